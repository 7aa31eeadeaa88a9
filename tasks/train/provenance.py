"""What a training is computed on and with: device, processor, number format, threads, code and packages."""

from collections.abc import Mapping, Sequence

import torch

from tasks import tracking
from tasks.config.train import TrainConfig
from tasks.model.device import choose_device, processor_name
from tasks.model.precision import choose_precision, precision_name
from tasks.system.cores import num_cores

UNKNOWN = "unknown"
"""The code's version, where neither git nor the image says one."""

MAX_NOTE_LENGTH = 4000
"""Characters of the note on a run: a tag of any MLflow server may have them."""


def named(
    *,
    device: str | None,
    processor: str | None,
    precision: str | None,
    num_threads: int | str | None,
    code: str | None,
    versions: Mapping[str, str],
) -> dict[str, str]:
    """Return what the last digits of a training depend on beside its settings and data, by the name in a sentence.

    Args:
        device: Its type is taken: two GPUs of one name compute the same. Here and in the others None is not known.
        processor: Name of the CPU or GPU.
        precision: Name of the number format.
        num_threads: That each rank computes with.
        code: The commit; one that is not known is a value of its own.
        versions: Of packages, by name.
    """
    found = {
        "the device": None if device is None else device.partition(":")[0],
        "the processor": processor,
        "the precision": precision,
        "the number of threads": None if num_threads is None else str(num_threads),
        "the code": code or UNKNOWN,
    }
    return {name: value for name, value in found.items() if value is not None} | dict(versions)


def current_provenance(
    device: torch.device, precision: torch.dtype | None, num_threads: int | None = None
) -> dict[str, str]:
    """Return what this process computes on and with; None: as many threads as torch has in it."""
    return named(
        device=str(device),
        processor=processor_name(device),
        precision=precision_name(precision, device),
        num_threads=num_threads or torch.get_num_threads(),
        code=tracking.code_commit(),
        versions=tracking.package_versions(),
    )


def expected_provenance(
    train: TrainConfig, image_size: int, num_ranks: int, gpu_obstacle: str | None = None
) -> dict[str, str]:
    """Return what ranks that were started on this machine now would compute on and with.

    Args:
        train: Settings of the training.
        image_size: Side of the cache's images, in pixels.
        num_ranks: Ranks that share the machine's cores.
        gpu_obstacle: Why they cannot use GPUs, where they cannot.

    Raises:
        WrongInput: The device or number format that is asked for is not there.
    """
    device = choose_device(train.device, 0, gpu_obstacle)
    precision = choose_precision(train.precision, device, image_size)
    return current_provenance(device, precision, train.num_threads or max(1, num_cores() // num_ranks))


def recorded_provenance(run: tracking.TrackedRun) -> dict[str, str]:
    """Return what an MLflow run said when it was opened; of a new one that is the code alone."""
    said = {name: run.params.get(name) for name in ("device", "processor", "precision", "num_threads")}
    return named(**said, code=run.code_version, versions=tracking.versions_in(run.params))


def checkpoint_provenance(stored: Mapping[str, str] | str) -> dict[str, str]:
    """Return what a checkpoint says that it was computed on; older ones have the text 'cpu in float32' or none."""
    if not isinstance(stored, str):
        return dict(stored)
    device, _, precision = stored.partition(" in ")
    return {"the device": device, "the precision": precision} if precision else {}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what is known of before and is not so now, a sentence each."""
    return [
        f"{name} was {value} and is {now.get(name, 'not there')}"
        for name, value in before.items()
        if now.get(name) != value
    ]


def note_of(noted: str | None, changed: Sequence[str]) -> str:
    """Return the note on a run that is gone on with otherwise than before, after what was noted already.

    Where it gets too long, what was noted first is left out.
    """
    return "; then ".join([*([noted] if noted else []), "; ".join(changed)])[-MAX_NOTE_LENGTH:]
