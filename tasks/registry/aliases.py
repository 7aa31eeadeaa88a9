"""The aliases of a registered model, the tags that they follow, and the trial of a version before it is champion."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.errors import WrongInput
from tasks.refs import ModelRef
from tasks.storage import Storage
from tasks.tracking import models
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.trained_tables import NOT_PROMOTED_TAG

CHAMPION = "champion"
CHALLENGER = "challenger"
"""Alias of the version that was last compared with the champion, and did not replace it."""
PREVIOUS = "previous"

CHAMPION_TAG = "lakevision.champion"
"""Tag of a registered model with the number of the last champion: MLflow deletes an alias with its version."""

LOAD_SECONDS = 600
"""Time limit of loading a version in a process of its own, which imports torch."""


def previous_champion(storage: Storage, champion: ModelRef) -> ModelRef | None:
    """Return the version that was the champion before this one, or None if there was none or it was deleted."""
    version: ModelRef | None = champion
    seen = set()
    while version is not None and version.version not in seen:
        seen.add(version.version)
        tags = models.version_tags(storage, version)
        # A rollback that was killed before the alias moved left its tag on a champion.
        if version != champion and models.ROLLED_BACK_TAG not in tags:
            return version
        number = tags.get(models.PREVIOUS_TAG)
        version = None if number is None else models.numbered_version(storage, champion.name, number)
    return None


def repair_aliases(storage: Storage, champion: ModelRef) -> None:
    """Set the alias `previous` to the version before the champion, or remove it if there is none.

    The alias follows the champion's tag, which was written before it became the champion: after a kill between the
    aliases, the next promotion or rollback sets them. The champion is not its own challenger. The registered model
    notes that it has a champion, so that the next one is not taken for the first if this one is deleted.
    """
    wanted = previous_champion(storage, champion)
    if models.model_with_alias(storage, champion.name, PREVIOUS) != wanted:
        if wanted is None:
            models.remove_alias(storage, champion.name, PREVIOUS)
        else:
            models.set_alias(storage, wanted, PREVIOUS)
    if models.model_with_alias(storage, champion.name, CHALLENGER) == champion:
        models.remove_alias(storage, champion.name, CHALLENGER)
    models.untag_version(storage, champion, NOT_PROMOTED_TAG)
    if models.model_tags(storage, champion.name).get(CHAMPION_TAG) != str(champion.version):
        models.tag_model(storage, champion.name, CHAMPION_TAG, str(champion.version))


def check_predicts(storage: Storage, model: ModelRef, which: str) -> None:
    """Check that a version can be loaded in a fresh process, and predicts an image.

    Args:
        storage: Storage with the tracking URI.
        model: The version.
        which: What it is, for the message.

    Raises:
        WrongInput: Its files differ from the registered ones, or it cannot be loaded.
    """
    with TemporaryDirectory(prefix="lakevision-trial-") as scratch:
        folder = fetch_registered(storage, model, Path(scratch) / "model")
        why = predict_once(folder)
    if why is not None:
        raise WrongInput(
            f"{model.name} version {model.version}, {which}, does not predict an image ({why[:400]})",
            way_out="the champion is unchanged; promote another run",
        )


def predict_once(folder: Path) -> str | None:
    """Predict an image by a model package in a fresh process; return why it failed, or None."""
    command = [sys.executable, "-m", "tasks.registry.trial_prediction", str(folder)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"its process ended with {error.returncode}"
    except subprocess.TimeoutExpired:
        return f"it takes more than {LOAD_SECONDS} s"
    return None
