"""The metrics of every epoch as an event file, for TensorBoard."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tasks.metrics.epoch import EpochMetrics


def scalar_tag(name: str) -> str:
    """Return the tag of a metric: `val_loss` is `loss/val`, so that TensorBoard shows it beside `loss/train`."""
    split, _, rest = name.partition("_")
    return f"{rest}/{split}" if split in {"train", "val"} else name


def write_event_file(folder: Path, history: Sequence[EpochMetrics], name: str) -> Path:
    """Write one event file with all epochs, the number of the epoch as step, and return it.

    Whole and at the end, not along the way: a training that was resumed has each epoch in it once.

    Args:
        folder: Where to write.
        history: The epochs in their order.
        name: Ends the file's name, so that the same training written again replaces it.
    """
    # Here and not at the top: no rank but one needs TensorBoard, and that once.
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for metrics in history:
            for field, value in asdict(metrics).items():
                if field != "epoch" and isinstance(value, int | float):
                    writer.add_scalar(scalar_tag(field), value, metrics.epoch)
    (written,) = folder.glob("events.out.tfevents.*")
    return written.rename(folder / f"events.out.tfevents.{name}")
