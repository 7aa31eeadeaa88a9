"""The metrics of one epoch."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class EpochMetrics:
    """Metrics of one epoch over all ranks."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    val_top5_accuracy: float
    val_macro_f1: float
    learning_rate: float
    gradient_norm: float
    """Mean gradient norm over the steps, before clipping."""
    images_per_second: float
    data_wait_share: float
    """Fraction of rank 0's training time spent waiting for batches."""
    train_seconds: float
    validation_seconds: float

    def values(self) -> dict[str, float]:
        """Return the metrics by name, without the number of the epoch."""
        return {name: float(value) for name, value in asdict(self).items() if name != "epoch"}
