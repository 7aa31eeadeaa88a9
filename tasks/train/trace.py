"""A trace of training steps by torch's profiler, for rank 0 of a run with `train.trace_steps`."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from tasks.errors import loggable
from tasks.progress.activity import working
from tasks.train.step_callback import NullStepCallback

logger = logging.getLogger("lakevision.train")

SKIPPED_STEPS = 3
"""First steps of a phase, which are not recorded: they allocate memory, and compile."""


class TracedSteps(NullStepCallback):
    """Callback that records the time of operations and threads in some steps, around another callback."""

    def __init__(self, inner: NullStepCallback, num_steps: int, name: str, log: Callable[[Path], None]) -> None:
        """Record nothing yet.

        Args:
            inner: The callback that decides.
            num_steps: Number of steps to record.
            name: Name of the file, in Chrome's trace format, compressed: `chrome://tracing` or ui.perfetto.dev show it.
            log: Takes the folder with the file.
        """
        self._inner = inner
        self._num_steps = num_steps
        self._name = name
        self._log = log
        self._done = 0
        self._profiler: profile | None = None

    def is_over(self) -> bool:
        """Return the answer of the inner callback."""
        return self._inner.is_over()

    def after_step(self) -> bool:
        """Begin or end the trace if it is time; return the answer of the inner callback."""
        self._done += 1
        if self._done == SKIPPED_STEPS:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.start()
        elif self._done == SKIPPED_STEPS + self._num_steps:
            self.end()
        return self._inner.after_step()

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
