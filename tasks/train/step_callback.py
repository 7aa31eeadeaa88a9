"""Actions between two steps: write a checkpoint, shut down after one, end the time budget, or trace the steps."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from tasks.collectives.reducer import FLAG, Reducer, broadcast_value
from tasks.errors import loggable
from tasks.progress.activity import working
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


@dataclass
class StepCallback(NullStepCallback):
    """Callback that makes the same decisions on all ranks after the same step.

    A single process decides after each step. Ranks decide together about once per AGREE_SECONDS of rank 0's clock. If
    any rank is interrupted, all ranks shut down after the same step, with one checkpoint of it.
    """

    reducer: Reducer
    save: Callable[[], None]
    """Writes a checkpoint; called on every rank after the same step."""
    checkpoint_seconds: float
    """Seconds between two checkpoints."""
    seconds_left: Callable[[], float]
    """Returns the remaining seconds of the time budget; only rank 0's counts."""

    def __post_init__(self) -> None:
        """Start the intervals."""
        self._saved_at = self._agreed_at = time.monotonic()
        self._steps_until = self._steps_between = 1

    def saved(self) -> None:
        """Restart the checkpoint interval after a checkpoint that was written elsewhere."""
        self._saved_at = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the time budget is used up, by rank 0's clock."""
        return broadcast_value(self.reducer, FLAG, self.seconds_left() <= 0)

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
            self.save()
            self.saved()
        if shutdown:
            raise KeyboardInterrupt("shutdown requested")
        return is_over

    def _agree(self) -> tuple[bool, bool, bool]:
        """Return whether to shut down, to write a checkpoint, and whether the time budget is used up."""
        now = time.monotonic()
        values = [
            float(self._is_shutdown_requested()),
            float(now - self._saved_at >= self.checkpoint_seconds),
            float(self.seconds_left() <= 0),
            now - self._agreed_at,
        ]
        self._agreed_at = now
        if self.reducer.num_ranks > 1:
            # Only rank 0's clock counts, but an interrupt of any rank.
            if self.reducer.rank != 0:
                values[1:] = [0.0, 0.0, 0.0]
            values = self.reducer.sum(torch.tensor(values, dtype=torch.float64)).tolist()
            steps = self._steps_between * AGREE_SECONDS / max(values[3], 1e-6)
            self._steps_between = int(min(max(1.0, steps), 2.0 * self._steps_between))
        self._steps_until = self._steps_between
        return bool(values[0]), bool(values[1]), bool(values[2])

    def _is_shutdown_requested(self) -> bool:
        return shutdown_requested()


logger = logging.getLogger("lakevision.train")

SKIPPED_STEPS = 3
"""First steps of a phase, which are not recorded: they allocate memory, and compile."""


class TracedSteps:
    """Recording of the time of operations and threads in some steps."""

    def __init__(self, num_steps: int, name: str, log: Callable[[Path], None]) -> None:
        """Record nothing yet.

        Args:
            num_steps: Number of steps to record.
            name: Name of the file, in Chrome's trace format, compressed: `chrome://tracing` or ui.perfetto.dev show it.
            log: Takes the folder with the file.
        """
        self._num_steps = num_steps
        self._name = name
        self._log = log
        self._done = 0
        self._profiler: profile | None = None

    def after_step(self) -> None:
        """Begin or end the trace if it is time."""
        self._done += 1
        if self._done == SKIPPED_STEPS:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.start()
        elif self._done == SKIPPED_STEPS + self._num_steps:
            self.end()

    def end(self) -> None:
        """Write the trace, if one was begun and not written; a failure is logged, and training continues."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with working("writing a trace"), TemporaryDirectory() as folder:
            profiler.stop()
            try:
                profiler.export_chrome_trace(str(Path(folder, self._name)))
                self._log(Path(folder))
            except Exception as error:
                logger.warning("the trace %s was not logged: %s", self._name, loggable(error))
