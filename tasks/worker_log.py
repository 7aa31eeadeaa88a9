"""What Spark's Python workers say: into one file, and from there into the run's log."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path

from tasks.printable import printable

logger = logging.getLogger("lakevision.spark")

WORKER_MARK = "lakevision-worker: "


def say(message: str) -> None:
    """Write one line that reaches the run's log (on a cluster: the executor's stderr)."""
    print(f"{WORKER_MARK}{printable(message)}", file=sys.stderr, flush=True)


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
                    if WORKER_MARK in line:
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
