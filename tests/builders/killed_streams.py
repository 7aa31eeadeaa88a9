"""Streams in processes that a test kills or cancels: killed_streams.py HOME INPUT INTERVAL, 0 for a run that ends.

The input is a table or a folder of images.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import filelock
import psutil

from tasks.storage import Storage
from tasks.system.signals import interrupt_on
from tests.builders.etl_and_cache import make_storage
from tests.builders.killed_runs import EndedRun, StartedRun, end_run
from tests.builders.processes import ROOT
from tests.builders.streams import stream

MODEL = "photos"


def start_stream(storage: Storage, given: str, interval_seconds: int = 0) -> StartedRun:
    """Start a stream of a table or folder, with small batches, in its own process, which leads a session."""
    log = Path(storage.home) / "stream.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.builders.killed_streams", storage.home, given, str(interval_seconds)],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    return StartedRun(process, log)


def batches(storage: Storage) -> tuple[int, int]:
    """Return the numbers of batches that the newest checkpoints of streams of a table have begun and ended."""
    root = Path(f"{storage.table('predictions')}.streams")
    begun, ended = (len(list(root.glob(f"*/*/{folder}/[0-9]*"))) for folder in ("offsets", "commits"))
    return begun, ended


def wait_for_batch(started: StartedRun, storage: Storage, least: int = 1) -> None:
    """Wait until a batch is in progress and `least` batches have begun, or until the process has ended."""
    while started.process.poll() is None:
        begun, ended = batches(storage)
        if begun >= least and begun > ended:
            return
        time.sleep(0.01)


def is_in_batch(storage: Storage) -> bool:
    """Return whether a batch, also one of files, is in progress, which has the lock of the predictions."""
    try:
        with filelock.FileLock(f"{storage.table('predictions')}.lock", timeout=0):
            return False
    except filelock.Timeout:
        return True


def wait_for_files(started: StartedRun, storage: Storage) -> None:
    """Wait until a batch of files is in progress, or until the process has ended."""
    while started.process.poll() is None and not is_in_batch(storage):
        time.sleep(0.01)


def kill_in_batch(storage: Storage, table: str, seconds: float, least: int = 1) -> tuple[bool, EndedRun]:
    """Run a stream, and kill its driver with SIGKILL some time after a batch began; return whether it was running."""
    started = start_stream(storage, table)
    wait_for_batch(started, storage, least)
    return kill_later(started, seconds)


def kill_later(started: StartedRun, seconds: float) -> tuple[bool, EndedRun]:
    """Kill the driver of a stream with SIGKILL after some time; return whether it was running."""
    time.sleep(seconds)
    running = started.process.poll() is None
    if running:
        psutil.Process(started.process.pid).kill()
    return running, end_run(started)


def cancel_in_batch(storage: Storage, table: str, least: int) -> EndedRun:
    """Run a stream without an end, and end its whole session with SIGTERM in a batch, as a cancellation does."""
    started = start_stream(storage, table, interval_seconds=1)
    wait_for_batch(started, storage, least)
    os.killpg(started.process.pid, signal.SIGTERM)
    return end_run(started)


def main(arguments: Sequence[str]) -> None:
    """Run the stream, and print the number of images that it predicted."""
    home, given, interval = arguments
    interrupt_on(signal.SIGTERM)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lakevision").setLevel(logging.INFO)
    is_table = Path(given, "_delta_log").is_dir()
    settings = {"table": given, "max_files_per_batch": 1} if is_table else {"source": given, "max_files_per_batch": 4}
    report = stream(make_storage(Path(home)), MODEL, interval_seconds=int(interval) or None, **settings)
    print(f"predicted {report.predicted}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
