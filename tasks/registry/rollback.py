"""Rollback: gives the alias `champion` back to the version that had it before."""

import logging
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks import tracking
from tasks.config.rollback import RollbackConfig
from tasks.errors import WrongInput
from tasks.model_package.description import FILE_LIMITS
from tasks.refs import ModelRef, Rollback
from tasks.registry.previous import CHAMPION, previous_champion, repair_previous
from tasks.registry.promote import promotion_lock
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables.snapshots import newest_snapshot

logger = logging.getLogger("lakevision.registry")

LOAD_SECONDS = 600
"""Time limit of loading a version in a process of its own, which imports torch."""


def roll_back(rollback: RollbackConfig, storage: Storage) -> Rollback:
    """Make the previous champion the champion again; promotions leave the version out that was the champion.

    The previous version is loaded first, in a fresh process, and must predict an image. The tag of the version that is
    rolled back is written before the alias moves: after a kill in between, another rollback does the rest.

    Args:
        rollback: Name of the registered model, and the reason.
        storage: Storage with the tracking URI, and the table from which a name is derived.

    Raises:
        WrongInput: The model has no champion, or no version to go back to; or that version cannot be loaded.
    """
    name = rollback.model_name or _derived_name(storage)
    with promotion_lock(storage, name):
        champion = tracking.model_with_alias(storage, name, CHAMPION)
        if champion is None:
            raise WrongInput(f"the registered model '{name}' has no champion: run the flow promote first")
        previous = previous_champion(storage, champion)
        if previous is None:
            raise WrongInput(
                f"{name} version {champion.version} has no previous champion that is still registered, to which "
                "it could be rolled back: promote another run"
            )
        _check_predicts(storage, previous)
        # The lock does not cover other machines.
        if tracking.model_with_alias(storage, name, CHAMPION) != champion:
            raise WrongInput(
                f"{name} version {champion.version} is not the champion any more, since another run promoted or rolled "
                "back meanwhile: look at the aliases in MLflow, and run the rollback again if it is still wanted"
            )
        done = Rollback(champion=previous, rolled_back=champion, reason=rollback.reason)
        tracking.tag_version(storage, champion, {tracking.ROLLED_BACK_TAG: done.sentence})
        tracking.tag_version(storage, previous, _tables_of(champion, storage))
        repair_previous(storage, previous)
        # The last step: a run that failed after it would be repeated, and would go back once more.
        tracking.set_alias(storage, previous, CHAMPION)
    logger.info("%s", done.sentence)
    return done


def _tables_of(champion: ModelRef, storage: Storage) -> dict[str, str]:
    """Return the tags of the tables that a champion predicts, for the version that predicts them from now on."""
    of = tracking.evaluated_version(storage, champion)
    tags: dict[str, str] = {}
    for table in (*of.serves, *(() if of.table is None else (of.table,))):
        tags |= tracking.serving_tags(table, table.source)
    return tags


def _derived_name(storage: Storage) -> str:
    try:
        found = newest_snapshot(None, storage.table("images"))
    except NeedsSpark:
        found = None
    name = None if found is None else tracking.derived_model_name(found.table, storage)
    if name is None:
        raise WrongInput(
            f"rollback.model_name is empty, and no name follows from the table '{storage.table('images')}': set "
            "rollback.model_name"
        )
    return name


def _check_predicts(storage: Storage, model: ModelRef) -> None:
    """Check that a version can be loaded in a fresh process, and predicts an image.

    Raises:
        WrongInput: Its files differ from the registered ones, or it cannot be loaded.
    """
    tracking.check_registered(tracking.version_tags(storage, model), model, FILE_LIMITS)
    with TemporaryDirectory(prefix="lakevision-rollback-") as scratch:
        folder = tracking.fetch_registered(storage, model, FILE_LIMITS, Path(scratch) / "model")
        command = [sys.executable, "-m", "tasks.registry.trial_prediction", str(folder)]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS, check=True)
            return
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines()
            why = lines[-1] if lines else f"its process ended with {error.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it takes more than {LOAD_SECONDS} s"
    raise WrongInput(
        f"{model.name} version {model.version}, the previous champion, does not predict an image ({why[:400]}): the "
        "champion is unchanged; promote another run"
    )
