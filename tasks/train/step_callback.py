"""What may happen between two steps: a checkpoint, leaving after one, the end of the time budget."""

import time
from collections.abc import Callable

import torch

from tasks.collectives import Reducer
from tasks.system.signals import shutdown_requested

AGREE_SECONDS = 1.0
"""Ranks agree about this often: each time is a message of all to all, which no step should wait for."""


class NullStepCallback:
    """Nothing happens between two steps."""

    def is_over(self) -> bool:
        """Return False."""
        return False

    def after_step(self) -> bool:
        """Return False."""
        return False


class StepCallback(NullStepCallback):
    """Decides after each step, alike on every rank; a single process decides after every step.

    Ranks decide together after a number of steps that rank 0's clock makes a second of. One that is asked to leave
    says so then, and all leave after the same step, with one checkpoint of it.
    """

    def __init__(
        self,
        reducer: Reducer,
        save: Callable[[], None],
        *,
        checkpoint_seconds: float,
        seconds_left: Callable[[], float],
    ) -> None:
        """Begin to count.

        Args:
            reducer: The other ranks.
            save: Write a checkpoint; called on every rank after the same step.
            checkpoint_seconds: Seconds between two checkpoints.
            seconds_left: What is left of the time budget, asked on rank 0.
        """
        self._reducer = reducer
        self._save = save
        self._checkpoint_seconds = checkpoint_seconds
        self._seconds_left = seconds_left
        self._saved_at = self._agreed_at = time.monotonic()
        self._steps_until = self._steps_between = 1

    def saved(self) -> None:
        """Take in that a checkpoint was written elsewhere."""
        self._saved_at = time.monotonic()

    def is_over(self) -> bool:
        """Say whether the budget is used up, by rank 0's clock."""
        return bool(self._reducer.broadcast(self._seconds_left() <= 0))

    def after_step(self) -> bool:
        """Save, or save and leave, where it is time; return whether the budget is used up.

        Raises:
            KeyboardInterrupt: This process, or one of another rank, was asked to leave; the checkpoint is written.
        """
        self._steps_until -= 1
        if self._steps_until > 0:
            return False
        leave, save, over = self._agree()
        if leave or save:
            self._save()
            self.saved()
        if leave:
            raise KeyboardInterrupt("asked to leave")
        return over

    def _agree(self) -> tuple[bool, bool, bool]:
        now = time.monotonic()
        own = [
            float(self._wants_to_leave()),
            float(now - self._saved_at >= self._checkpoint_seconds),
            float(self._seconds_left() <= 0),
            now - self._agreed_at,
        ]
        self._agreed_at = now
        if self._reducer.num_ranks > 1:
            # Rank 0's clock alone counts, and a wish to leave from anywhere.
            if self._reducer.rank != 0:
                own[1:] = [0.0, 0.0, 0.0]
            own = self._reducer.sum(torch.tensor(own, dtype=torch.float64)).tolist()
            wanted = self._steps_between * AGREE_SECONDS / max(own[3], 1e-6)
            self._steps_between = int(min(max(1.0, wanted), 2.0 * self._steps_between))
        self._steps_until = self._steps_between
        return bool(own[0]), bool(own[1]), bool(own[2])

    def _wants_to_leave(self) -> bool:
        return shutdown_requested()
