"""How far a training run is, in epochs: one source for its bar and its artifact."""

import time
from collections.abc import Mapping
from typing import Any

from tasks.progress.count import EPOCHS, Standing, tell


class EpochProgress:
    """Tells what listens how many epochs are trained, from the events of rank 0."""

    def __init__(self, key: str, max_epochs: int) -> None:
        """Begin with none.

        Args:
            key: Of the training run among a flow's; the step is called `<key>-epochs`.
            max_epochs: Upper bound; training may stop early.
        """
        self._step = f"{key}{EPOCHS}"
        self._began = time.monotonic()
        self._before: int | None = None
        self._last = Standing(self._step, 0, max_epochs, 0.0, "epochs")
        tell(self._last)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in an event: epoch (the number of epochs trained), max_epochs and val_accuracy."""
        epoch = event["epoch"]
        if self._before is None:
            self._before = epoch - 1  # a resumed run has trained those in another process
        # As if all of them had been trained at the rate of this process.
        seconds = (time.monotonic() - self._began) * epoch / (epoch - self._before)
        note = f"val accuracy {event['val_accuracy']:.4f}"
        self._last = Standing(self._step, epoch, event["max_epochs"], seconds, "epochs", note)
        tell(self._last)

    def end(self) -> None:
        """Tell that the training run has ended, with as many epochs as it has."""
        last = self._last
        seconds = time.monotonic() - self._began
        tell(Standing(self._step, last.done, last.done, seconds, "epochs", last.note))
