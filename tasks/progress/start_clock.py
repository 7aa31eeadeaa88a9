"""The time from the start of a process to its first training step, by part; uses only the standard library."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("lakevision.train")


class StartClock:
    """Clock of the parts before the first step, which are logged once; it ignores them until `begin` is called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs = False
        self._began = self._part_began = 0.0
        self._parts: list[str] = []

    def begin(self) -> None:
        """Start the clock, at the beginning of a process that only trains."""
        self._runs = True
        self._began = self._part_began = self._clock()

    def passed(self, part: str) -> None:
        """Note the end of a part, which began with the end of the one before."""
        if self._runs:
            now = self._clock()
            self._parts.append(f"{part} {now - self._part_began:.1f} s")
            self._part_began = now

    def stepped(self) -> None:
        """Note the end of a step; log the parts after the first one."""
        if self._runs:
            self.passed("step")
            logger.info(
                "first step %.1f s after the start of this process: %s",
                self._part_began - self._began,
                ", ".join(self._parts),
            )
            self._runs = False


process_start = StartClock()
"""The clock of this process."""
