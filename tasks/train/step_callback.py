"""Actions between two steps: write a checkpoint, shut down after one, or end the time budget."""

import time
from collections.abc import Callable

import torch

from tasks.broadcast import FLAG, broadcast_value
from tasks.collectives import Reducer
from tasks.progress.start_clock import process_start
from tasks.system.signals import shutdown_requested

AGREE_SECONDS = 1.0
"""Approximate seconds between two decisions of the ranks; each is an allreduce, too slow for every step."""


class NullStepCallback:
    """Callback that does nothing between two steps."""

    def is_over(self) -> bool:
        """Return False."""
        return False

    def after_step(self) -> bool:
        """Return False."""
        return False


class StepCallback(NullStepCallback):
    """Callback that makes the same decisions on all ranks after the same step.

    A single process decides after each step. Ranks decide together about once per AGREE_SECONDS of rank 0's clock. If
    any rank is interrupted, all ranks shut down after the same step, with one checkpoint of it.
    """

    def __init__(
        self,
        reducer: Reducer,
        save: Callable[[], None],
        *,
        checkpoint_seconds: float,
        seconds_left: Callable[[], float],
    ) -> None:
        """Start the intervals.

        Args:
            reducer: The other ranks.
            save: Writes a checkpoint; called on every rank after the same step.
            checkpoint_seconds: Seconds between two checkpoints.
            seconds_left: Returns the remaining seconds of the time budget; only rank 0's counts.
        """
        self._reducer = reducer
        self._save = save
        self._checkpoint_seconds = checkpoint_seconds
        self._seconds_left = seconds_left
        self._saved_at = self._agreed_at = time.monotonic()
        self._steps_until = self._steps_between = 1

    def saved(self) -> None:
        """Restart the checkpoint interval after a checkpoint that was written elsewhere."""
        self._saved_at = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the time budget is used up, by rank 0's clock."""
        return broadcast_value(self._reducer, FLAG, self._seconds_left() <= 0)

    def after_step(self) -> bool:
        """Write a checkpoint or shut down if it is time; return whether the time budget is used up.

        Raises:
            KeyboardInterrupt: This process or that of another rank was interrupted; the checkpoint is written.
        """
        process_start.stepped()
        self._steps_until -= 1
        if self._steps_until > 0:
            return False
        shutdown, save, is_over = self._agree()
        if shutdown or save:
            self._save()
            self.saved()
        if shutdown:
            raise KeyboardInterrupt("shutdown requested")
        return is_over

    def _agree(self) -> tuple[bool, bool, bool]:
        """Return whether to shut down, to write a checkpoint, and whether the time budget is used up."""
        now = time.monotonic()
        values = [
            float(self._is_shutdown_requested()),
            float(now - self._saved_at >= self._checkpoint_seconds),
            float(self._seconds_left() <= 0),
            now - self._agreed_at,
        ]
        self._agreed_at = now
        if self._reducer.num_ranks > 1:
            # Only rank 0's clock counts, but an interrupt of any rank.
            if self._reducer.rank != 0:
                values[1:] = [0.0, 0.0, 0.0]
            values = self._reducer.sum(torch.tensor(values, dtype=torch.float64)).tolist()
            steps = self._steps_between * AGREE_SECONDS / max(values[3], 1e-6)
            self._steps_between = int(min(max(1.0, steps), 2.0 * self._steps_between))
        self._steps_until = self._steps_between
        return bool(values[0]), bool(values[1]), bool(values[2])

    def _is_shutdown_requested(self) -> bool:
        return shutdown_requested()
