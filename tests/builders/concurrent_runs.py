"""Two runs with the same tables and cache, and a source that changes during a run."""

import itertools
import os
import threading
import time
from pathlib import Path

from tasks.etl.ingest import ingest_source, prepare_ingest
from tasks.spark.session import spark_session
from tasks.storage import Storage
from tests.builders.etl_and_cache import SPARK, settings
from tests.builders.killed_runs import StartedRun, start_run


def start_two_runs(source: Path, storage: Storage, seconds_apart: float) -> tuple[StartedRun, StartedRun]:
    """Start two runs of both stages with the same tables and cache."""
    first = start_run(source, storage, Path(storage.home) / "one.log")
    time.sleep(seconds_apart)
    return first, start_run(source, storage, Path(storage.home) / "two.log")


def find_waiting_run(runs: tuple[StartedRun, StartedRun]) -> int | None:
    """Return the index of the run that waits for the other's lock, or None where a run ends before one waits."""
    while all(run.process.poll() is None for run in runs):
        for index, run in enumerate(runs):
            if "waiting until it ends" in run.log.read_text():
                return index
        time.sleep(0.05)
    return None


class _Writer:
    """A thread that changes two files of a source while the context is entered, and restores them at its end."""

    def __init__(self, replaced: Path, overwritten: Path) -> None:
        self._replaced = replaced
        self._overwritten = overwritten
        self._contents = replaced.read_bytes(), overwritten.read_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        first, second = self._contents
        for number in itertools.count():
            stop = self._stop.is_set()
            beside = self._replaced.with_name(".beside")
            beside.write_bytes(first if stop or number % 2 else second[: len(second) // 2])
            os.replace(beside, self._replaced)
            with self._overwritten.open("r+b") as file:
                for begin in range(0, len(second), 4096):
                    file.seek(begin)
                    file.write(second[begin : begin + 4096] if stop or number % 2 else bytes(4096))
                    file.flush()
                file.truncate(len(second))
            if stop:
                return
            time.sleep(0.005)


def ingest_changing_source(source: Path, storage: Storage) -> tuple[int, int]:
    """Ingest a source of which one listed file is missing, one is replaced and one is overwritten during the run.

    All three are as before when it returns.

    Returns:
        The number of listed files, and the number of stored images.
    """
    moved, aside = source / "red" / "000.png", source.with_name("gone.png")
    with spark_session(SPARK, storage):
        listed = prepare_ingest(settings(source), storage, SPARK)
        moved.rename(aside)
        with _Writer(source / "green" / "000.png", source / "blue" / "000.png"):
            report = ingest_source(settings(source), listed, storage, SPARK)
        aside.rename(moved)
    return listed.listing.num_rows, report.stored
