"""Progress of a training run in epochs, for its progress bar and its artifact."""

import time
from collections.abc import Mapping
from typing import Any

from tasks.progress.count import EPOCHS, StepProgress, publish


class EpochProgress:
    """Counter of trained epochs that passes the events of rank 0 to the progress listeners."""

    def __init__(self, key: str, max_epochs: int) -> None:
        """Report the start of the training run, with no epoch trained.

        Args:
            key: Name of the training run within its flow; the step is called `<key>-epochs`.
            max_epochs: Maximum number of epochs; training may stop early.
        """
        self._step = f"{key}{EPOCHS}"
        self._began = time.monotonic()
        self._before: int | None = None
        self._last = StepProgress(self._step, 0, max_epochs, 0.0, "epochs")
        publish(self._last)

    def update(self, event: Mapping[str, Any]) -> None:
        """Report the progress in an event with epoch (the number of epochs trained), max_epochs and val_accuracy."""
        epoch = event["epoch"]
        if self._before is None or epoch <= self._before:
            self._before = epoch - 1  # a resumed run has trained these in an earlier process
        # Extrapolated, as if all epochs had been trained at the rate of this process.
        seconds = (time.monotonic() - self._began) * epoch / (epoch - self._before)
        note = f"val accuracy {event['val_accuracy']:.4f}"
        self._last = StepProgress(self._step, epoch, event["max_epochs"], seconds, "epochs", note)
        publish(self._last)

    def end(self) -> None:
        """Report that the training run has ended, with the number of epochs trained as the total."""
        last = self._last
        seconds = time.monotonic() - self._began
        publish(StepProgress(self._step, last.done, last.done, seconds, "epochs", last.note))
