"""What Spark's Python workers say: into one file, and from there into the run's log."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path

from pyspark import Accumulator, TaskContext

from tasks.progress.count import TELL_SECONDS, advance
from tasks.spark.progress import EndedParts
from tasks.text.printable import printable

logger = logging.getLogger("lakevision.spark")

WORKER_MARK = "lakevision-worker: "
PROGRESS_MARK = "lakevision-progress: "
"""Lines with this mark are counts: process id of the driver, step, partition, images done."""


def say(message: str) -> None:
    """Write one line that reaches the run's log (on a cluster: the executor's stderr)."""
    print(f"{WORKER_MARK}{printable(message)}", file=sys.stderr, flush=True)


@dataclass
class WorkerCount:
    """Counts what one Spark task has done of a step, and says so at most every TELL_SECONDS and at its end.

    On a cluster its lines stay in the executor's stderr; what it says at its end reaches the driver.
    """

    step: str
    driver: int
    """Process id of the driver, which adds up: runs that share a home share the log."""
    ended: Accumulator[EndedParts] | None = None
    done: int = 0
    told: float = 0.0

    def add(self, images: int) -> None:
        """Count so many more."""
        self.done += images
        now = time.monotonic()
        if now - self.told < TELL_SECONDS:
            return
        self.told = now
        # Of one piece, as another worker may write to the same file.
        sys.stderr.write(f"{PROGRESS_MARK}{self.driver} {self.step} {self._part} {self.done}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Tell the driver what the task has done, which has read all of its input."""
        if self.ended is not None:
            self.ended.add(((self.step, self._part, self.done),))

    @property
    def _part(self) -> str:
        task = TaskContext.get()
        return "0" if task is None else str(task.partitionId())


def _take_count(line: str) -> None:
    words = line.split(PROGRESS_MARK, 1)[1].split()
    # A line that two workers wrote into at once is none.
    if len(words) == 4 and words[0] == str(os.getpid()) and words[3].isdecimal():
        advance(words[1], words[2], int(words[3]))


@contextmanager
def stderr_into(log: Path) -> Iterator[None]:
    """Let processes started inside write their stderr to `log`: the JVM, and through it the Python workers."""
    log.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def forward_worker_lines(log: Path) -> Iterator[None]:
    """Log what Python workers say, while they say it."""
    stop = threading.Event()
    start = log.stat().st_size

    def follow() -> None:
        with log.open("r", errors="replace") as file:
            file.seek(start)
            while True:
                last_round = stop.is_set()
                for line in file:
                    if PROGRESS_MARK in line:
                        _take_count(line)
                    elif WORKER_MARK in line:
                        logger.info("worker: %s", line.split(WORKER_MARK, 1)[1].rstrip())
                if last_round:
                    return
                time.sleep(0.2)

    # The run's log handler finds its run in the context, which a thread does not inherit by itself.
    thread = threading.Thread(target=copy_context().run, args=(follow,), name="spark-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
