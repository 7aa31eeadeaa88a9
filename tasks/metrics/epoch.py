"""The metrics of one epoch."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class EpochMetrics:
    """What one epoch gave, over all ranks."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    val_top5_accuracy: float
    val_macro_f1: float
    learning_rate: float
    gradient_norm: float
    """Mean over the steps, before it is bounded."""
    images_per_second: float
    data_wait_share: float
    """Share of the training time of rank 0 spent waiting for batches."""
    train_seconds: float
    validation_seconds: float

    def values(self) -> dict[str, float]:
        """Return the metrics by name, without the epoch's number."""
        return {name: float(value) for name, value in asdict(self).items() if name != "epoch"}
