"""Provenance of a training run: device, processor, number format, threads, code and packages."""

from collections.abc import Mapping, Sequence

import torch

from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.device import choose_device, processor_name
from tasks.model.precision import choose_precision, precision_name
from tasks.system.cores import num_cores
from tasks.tracking.runs import VERSION_PARAM, code_commit, package_versions, values_below
from tasks.tracking.tracked_run import TrackedRun

UNKNOWN = "unknown"
"""Version of the code if neither git nor the container image has one."""

MAX_NOTE_LENGTH = 4000
"""Maximum characters of the note on a run, which every MLflow server accepts in a tag."""


def make_provenance(
    *,
    device: str | None,
    processor: str | None,
    precision: str | None,
    num_threads: int | str | None,
    code: str | None,
    versions: Mapping[str, str],
) -> dict[str, str]:
    """Return what the exact result depends on besides settings and data, by its name in messages.

    Args:
        device: Device, of which only the type counts: two GPUs of one model compute the same. None is unknown, here and
            for the other arguments.
        processor: Name of the CPU or GPU.
        precision: Name of the number format.
        num_threads: Threads of each rank.
        code: Commit; an unknown one is compared as the value UNKNOWN.
        versions: Versions of packages, by name.
    """
    values = {
        "the device": None if device is None else device.partition(":")[0],
        "the processor": processor,
        "the precision": precision,
        "the number of threads": None if num_threads is None else str(num_threads),
        "the code": code or UNKNOWN,
    }
    return {name: value for name, value in values.items() if value is not None} | dict(versions)


def current_provenance(
    device: torch.device, precision: torch.dtype | None, num_threads: int | None = None
) -> dict[str, str]:
    """Return the provenance of this process; with `num_threads` None, torch's number of threads is taken."""
    return make_provenance(
        device=str(device),
        processor=processor_name(device),
        precision=precision_name(precision, device),
        num_threads=num_threads or torch.get_num_threads(),
        code=code_commit(),
        versions=package_versions(),
    )


def expected_provenance(
    train: TrainConfig, image_size: int, num_ranks: int, gpu_obstacle: WrongInput | None = None
) -> dict[str, str]:
    """Return the provenance of ranks if they were started on this machine now.

    Args:
        train: Settings of the training.
        image_size: Side of the cache's images, in pixels.
        num_ranks: Ranks that share the machine's cores.
        gpu_obstacle: Reason why the ranks cannot use GPUs; None if they can.

    Raises:
        WrongInput: The device or number format of the settings is not available.
    """
    device = choose_device(train.device, 0, gpu_obstacle)
    precision = choose_precision(train.precision, device, image_size)
    return current_provenance(device, precision, train.num_threads or max(1, num_cores() // num_ranks))


def recorded_provenance(run: TrackedRun) -> dict[str, str]:
    """Return the provenance that an MLflow run had when it was opened; for a new run only the code."""
    logged = {name: run.params.get(name) for name in ("device", "processor", "precision", "num_threads")}
    return make_provenance(**logged, code=run.code_version, versions=values_below(run.params, VERSION_PARAM))


def provenance_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a sentence for each value that was known before and is different now."""
    return [
        f"{name} was {value} and is {now.get(name, 'missing')}"
        for name, value in before.items()
        if now.get(name) != value
    ]


def append_to_note(note: str | None, changed: Sequence[str]) -> str:
    """Return the note on a run that is resumed with changes, appended to the existing note.

    A note longer than MAX_NOTE_LENGTH loses its beginning.
    """
    return "; then ".join([*([note] if note else []), "; ".join(changed)])[-MAX_NOTE_LENGTH:]
