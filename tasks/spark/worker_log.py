"""Reports of Spark's Python workers to the driver: messages for the run's log, and the progress of a step."""

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

from pyspark import Accumulator, AccumulatorParam, SparkContext, TaskContext

from tasks.progress.count import UPDATE_SECONDS, advance
from tasks.text.markup import printable

logger = logging.getLogger("lakevision.spark")


EndedParts = tuple[tuple[str, str, int], ...]
"""Step, partition and number of images of each task that ended."""

IMAGES_PER_TASK = 5_000
"""Images per task of a large step: a task of several minutes would show no progress for as long."""

MAX_TASKS_PER_CORE = 8
"""Upper bound, as each task has a fixed cost."""


class EndedTasks(AccumulatorParam[EndedParts]):
    """Accumulator that adds each ended task to the driver's counts.

    Spark merges a task's updates once, when it succeeds. A task that ran twice counts once (`advance`).
    """

    def zero(self, value: EndedParts) -> EndedParts:
        """Return the initial value."""
        return ()

    def addInPlace(self, value1: EndedParts, value2: EndedParts) -> EndedParts:  # noqa: N802  # Spark's name
        """Collect in a task; on the driver, which has no task context, count and return the empty value."""
        if TaskContext.get() is not None:
            return value1 + value2
        for step, part, images in value1 + value2:
            advance(step, part, images)
        return ()


def count_ended_tasks(spark: SparkContext) -> Accumulator[EndedParts]:
    """Return the accumulator to which `tasks.spark.worker_log.WorkerCount` adds each task of a step."""
    return spark.accumulator((), EndedTasks())


def num_tasks(rows: int, cores: int, least: int) -> int:
    """Return the number of tasks of a step: one per IMAGES_PER_TASK images, within bounds.

    Args:
        rows: Number of images of the step.
        cores: Number of cores of the session.
        least: Minimum number of tasks.
    """
    return max(least, min(-(-rows // IMAGES_PER_TASK), MAX_TASKS_PER_CORE * cores))


WORKER_MARK = "lakevision-worker: "
PROGRESS_MARK = "lakevision-progress: "
"""Prefix of the lines with counts: process id of the driver, step, partition, number of images done."""


def log_from_worker(message: str) -> None:
    """Write one line to the run's log (on a cluster: to the executor's stderr)."""
    print(f"{WORKER_MARK}{printable(message)}", file=sys.stderr, flush=True)


@dataclass
class WorkerCount:
    """Counter of the images of one Spark task, reported at most every UPDATE_SECONDS and at the end of the task.

    On a cluster the lines stay in the executor's stderr; the count at the end reaches the driver.
    """

    step: str
    driver: int
    """Process id of the driver that sums the counts: runs with the same home share the log."""
    ended: Accumulator[EndedParts] | None = None
    done: int = 0
    last_report: float = 0.0

    def add(self, images: int) -> None:
        """Add a number of images."""
        self.done += images
        now = time.monotonic()
        if now - self.last_report < UPDATE_SECONDS:
            return
        self.last_report = now
        # A single write, as other workers write to the same file.
        sys.stderr.write(f"{PROGRESS_MARK}{self.driver} {self.step} {self._part} {self.done}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Report the count of the task to the driver, once it has read all of its input."""
        if self.ended is not None:
            self.ended.add(((self.step, self._part, self.done),))

    @property
    def _part(self) -> str:
        task = TaskContext.get()
        return "0" if task is None else str(task.partitionId())


def _read_count(line: str) -> None:
    words = line.split(PROGRESS_MARK, 1)[1].split()
    # A line with interleaved writes of two workers is skipped.
    if len(words) == 4 and words[0] == str(os.getpid()) and words[3].isdecimal():
        advance(words[1], words[2], int(words[3]))


@contextmanager
def stderr_into(log: Path) -> Iterator[None]:
    """Redirect the stderr of processes started inside to `log`: the JVM, and through it the Python workers."""
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
    """Log the messages of Python workers as they are written; the log file is created if it does not exist."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    stop = threading.Event()
    start = log.stat().st_size

    def follow() -> None:
        with log.open("r", errors="replace") as file:
            file.seek(start)
            while True:
                last_round = stop.is_set()
                if os.fstat(file.fileno()).st_size < file.tell():
                    file.seek(0)  # Another process has rotated the log.
                for line in file:
                    if PROGRESS_MARK in line:
                        _read_count(line)
                    elif WORKER_MARK in line:
                        logger.info("worker: %s", line.split(WORKER_MARK, 1)[1].rstrip())
                if last_round:
                    return
                time.sleep(0.2)

    # The run's log handler reads the run from the context, which threads do not inherit.
    thread = threading.Thread(target=copy_context().run, args=(follow,), name="spark-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
