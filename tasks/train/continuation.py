"""Checkpoints that a training run resumes from: its own, or that of a run with another key.

Another key has the same run in older releases, or a run of fewer epochs. More epochs continue a run where the learning
rate of its steps stays the same: with the schedules `constant` and `plateau`, in the first phase, and with the same
warm-up. The weights are then those of a run that had as many epochs from the start. With `cosine` and `one_cycle` every
step of the longer run has another learning rate.
"""

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.frozen import flat_params
from tasks.config.recipe import values_of
from tasks.errors import WrongInput, join_names
from tasks.refs import TRIAL_TAG
from tasks.train.checkpoint import Checkpoints
from tasks.train.checkpoint_files import (
    FINISHED,
    files_of,
    keep_finished,
    newest_position,
    remove_checkpoints,
    written_at_once,
)
from tasks.train.schedule import warmup_length
from tasks.train.spec import TrainingSpec, key_of

logger = logging.getLogger("lakevision.train")


def can_be_continued(spec: TrainingSpec) -> bool:
    """Return whether more epochs may continue a training run, so that its last checkpoint is kept.

    Trials are no such runs: there may be hundreds of them. Neither are repetitions, which train from the start.
    """
    continues = spec.train.schedule in {"constant", "plateau"} and _max_epochs(spec.identity) is not None
    return continues and spec.repetition is None and TRIAL_TAG not in spec.tags


def _max_epochs(identity: Mapping[str, Any]) -> int | None:
    """Return `max_epochs` as in the identity of a run, or of the run of a checkpoint; None if the recipe decides."""
    epochs: int | None = identity.get("train", {}).get("max_epochs")
    return epochs


def end_checkpoints(spec: TrainingSpec) -> None:
    """Remove the checkpoints of the finished run, except for the last one if more epochs may continue it."""
    (keep_finished if can_be_continued(spec) else remove_checkpoints)(spec.storage.checkpoints / spec.key)


def continues(spec: TrainingSpec, content: Mapping[str, Any]) -> bool:
    """Return whether a run continues a checkpoint of fewer epochs with the same learning rates.

    Args:
        spec: The training run.
        content: A checkpoint of a run with the same settings and data, except for `max_epochs`.
    """
    train, epochs = values_of(spec.train), _max_epochs(content["config"])
    if not can_be_continued(spec) or epochs is None or not epochs < train.max_epochs or content["phase"] != 0:
        return False
    global_batch = content["batch_size"] * spec.num_virtual_ranks * train.accumulate_steps
    before = train.model_copy(update={"max_epochs": epochs})
    return warmup_length(before, global_batch) == warmup_length(train, global_batch)


def neutral_settings(spec: TrainingSpec, content: Mapping[str, Any]) -> set[str]:
    """Return the settings of `train` that a checkpoint may have another value of."""
    return {*spec.train.neutral, *(["max_epochs"] if continues(spec, content) else [])}


def check_fits(
    content: dict[str, Any], config: dict[str, Any], classes: Sequence[str], folder: Path, neutral: Collection[str] = ()
) -> None:
    """Check that a checkpoint belongs to the training run that resumes from it.

    Args:
        content: The checkpoint.
        config: The `decisive_settings` of the training run.
        classes: Class names of the training run.
        folder: Folder of the checkpoint, for the message.
        neutral: Settings of `train` that may differ.

    Raises:
        WrongInput: Settings, data or classes differ; names the differences with both values.
    """
    different = [
        f"classes only in the {where}: {join_names(sorted(names)[:5], len(names))}"
        for where, names in (
            ("checkpoint", set(content["classes"]) - set(classes)),
            ("data", set(classes) - set(content["classes"])),
        )
        if names
    ]
    saved, current = flat_params(content["config"]), flat_params(config)
    compared = (saved.keys() | current.keys()) - {f"train.{name}" for name in neutral}
    settings = sorted(name for name in compared if saved.get(name) != current.get(name))
    different += [
        f"{name} is {saved.get(name)!r} in the checkpoint and {current.get(name)!r} now" for name in settings[:4]
    ]
    if different:
        raise WrongInput(
            f"the checkpoint in '{folder}' is of another training run ({'; '.join(different)})",
            way_out="train with its data and settings, or remove the files in that folder to start again",
        )


def continued_run(spec: TrainingSpec, content: Mapping[str, Any]) -> str | None:
    """Return the MLflow run of fewer epochs that a checkpoint is of, or None if it is of this training run."""
    return str(content["run_id"]) if _max_epochs(content["config"]) != _max_epochs(spec.identity) else None


def adopt_checkpoint(spec: TrainingSpec) -> None:
    """Give a training run without checkpoints those of the same run under another key, if there are any.

    They are hard links where the file system has them: a checkpoint is written once.

    Raises:
        OSError: A checkpoint could not be read.
        WrongInput: No checkpoint of this run under its key of older releases can be read.
    """
    folder = spec.storage.checkpoints / spec.key
    if newest_position(folder) is not None:
        return
    for other in _other_folders(spec):
        try:
            name, content = Checkpoints(other, 1, {}).newest()
        except WrongInput as error:
            if other.name in spec.keys:
                raise  # This run under its key of older releases.
            logger.warning("training does not continue there: %s", error)
            continue
        if name is None:
            continue
        if _max_epochs(content["config"]) == _max_epochs(spec.identity) or continues(spec, content):
            logger.info("training continues from the checkpoint %s", other / name)
            folder.mkdir(parents=True, exist_ok=True)
            for file in files_of(name):
                _link(other / file, folder / file)
            return


def _other_folders(spec: TrainingSpec) -> Iterator[Path]:
    """Yield the folders of the same run under other keys, with more epochs first."""
    root = spec.storage.checkpoints
    for key in spec.keys[1:]:
        yield root / key
    if not can_be_continued(spec):
        return
    identity = spec.identity
    for epochs in range((_max_epochs(identity) or 1) - 1, 0, -1):
        folder = root / key_of(identity | {"train": identity["train"] | {"max_epochs": epochs}})
        yield folder
        yield folder / FINISHED


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except FileExistsError:  # Of a process that was killed here.
        return
    except OSError:  # A file system without hard links.
        with file.open("rb") as source, written_at_once(link) as target:
            shutil.copyfileobj(source, target)
