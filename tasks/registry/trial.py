"""The trial of a registered version before it becomes the champion: a fresh process loads it and predicts an image."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.errors import WrongInput
from tasks.model_package.description import FILE_LIMITS
from tasks.refs import ModelRef
from tasks.storage import Storage
from tasks.tracking import models
from tasks.tracking.classifier_files import check_registered, fetch_registered

LOAD_SECONDS = 600
"""Time limit of loading a version in a process of its own, which imports torch."""


def check_predicts(storage: Storage, model: ModelRef, which: str) -> None:
    """Check that a version can be loaded in a fresh process, and predicts an image.

    Args:
        storage: Storage with the tracking URI.
        model: The version.
        which: What it is, for the message.

    Raises:
        WrongInput: Its files differ from the registered ones, or it cannot be loaded.
    """
    check_registered(models.version_tags(storage, model), model, FILE_LIMITS)
    with TemporaryDirectory(prefix="lakevision-trial-") as scratch:
        folder = fetch_registered(storage, model, FILE_LIMITS, Path(scratch) / "model")
        why = predict_once(folder)
    if why is not None:
        raise WrongInput(
            f"{model.name} version {model.version}, {which}, does not predict an image ({why[:400]}): the champion is "
            "unchanged; promote another run"
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
