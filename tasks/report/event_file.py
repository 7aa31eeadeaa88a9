"""The metrics of every epoch as an event file for TensorBoard."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tasks.metrics.epoch import EpochMetrics


def scalar_tag(name: str) -> str:
    """Return the tag of a metric: `loss/val` for `val_loss`, which TensorBoard then shows beside `loss/train`."""
    split, _, rest = name.partition("_")
    return f"{rest}/{split}" if split in {"train", "val"} else name


def write_event_file(folder: Path, history: Sequence[EpochMetrics], name: str) -> Path:
    """Write one event file with all epochs, with the number of the epoch as the step, and return it.

    It is written at the end and not during training, so that a resumed run has each epoch in it only once.

    Args:
        folder: Folder of the file.
        history: Metrics of the epochs, in order.
        name: Suffix of the file's name, so that a repeated call for the same run replaces the file.
    """
    # Here and not at the top: only rank 0 needs TensorBoard, and only once.
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for metrics in history:
            for field, value in asdict(metrics).items():
                if field != "epoch" and isinstance(value, int | float):
                    writer.add_scalar(scalar_tag(field), value, metrics.epoch)
    (written,) = folder.glob("events.out.tfevents.*")
    return written.rename(folder / f"events.out.tfevents.{name}")
