"""Runs that are not alone: another run at the same places, and somebody who writes to the source."""

import itertools
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from tasks.etl.ingest import ingest_source, prepare_ingest
from tasks.spark.session import spark_session
from tests.builders.etl_and_cache import SPARK, make_storage, settings
from tests.builders.killed_runs import (
    Undisturbed,
    check_made_good,
    end_run,
    kill_in,
    leftovers,
    run_and_read,
    start_run,
)


def check_two_at_once(undisturbed: Undisturbed, home: Path, seconds_apart: float) -> None:
    """Two runs of both stages at the same places: each table is committed once, the cache built once."""
    storage = make_storage(home)
    logs = [home / "one.log", home / "two.log"]
    runs = [start_run(undisturbed.source, storage, logs[0])]
    time.sleep(seconds_apart)
    runs.append(start_run(undisturbed.source, storage, logs[1]))
    said = [end_run(process, log) for process, log in zip(runs, logs, strict=True)]
    assert [process.returncode for process in runs] == [0, 0], said
    for name in ("images", "files"):
        assert [path.name for path in Path(storage.table(name)).glob("_delta_log/*.json")] == [f"{0:020}.json"]
    assert sum(" rows, val " in one for one in said) == 1, "both built the cache"
    assert run_and_read(undisturbed.source, storage) == undisturbed.held
    assert leftovers(storage) == []


def check_killed_in_company(undisturbed: Undisturbed, home: Path) -> None:
    """Of two runs the one at the tables loses its driver, and the other one its JVM while it builds the cache."""
    storage = make_storage(home)
    logs = [home / "one.log", home / "two.log"]
    runs = [start_run(undisturbed.source, storage, log) for log in logs]
    waiting = None
    while waiting is None and all(process.poll() is None for process in runs):
        waiting = next((number for number in (0, 1) if "waiting until it ends" in logs[number].read_text()), None)
        time.sleep(0.05)
    assert waiting is not None, [log.read_text() for log in logs]
    assert kill_in(runs[1 - waiting], "driver", "reading", storage, seconds=0), logs[1 - waiting].read_text()
    killed = kill_in(runs[waiting], "jvm", "building", storage, seconds=0)
    said = [end_run(process, log) for process, log in zip(runs, logs, strict=True)]
    assert killed, said
    assert runs[1 - waiting].returncode == -signal.SIGKILL, said
    check_made_good(undisturbed, storage)


class _Writer:
    """Writes to files of a source for as long as it is entered, then leaves them as they were at the start."""

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


def check_changing_source(undisturbed: Undisturbed, folder: Path) -> None:
    """Files change, and one goes, while they are read: the run ends, and the next one has what is there then."""
    source, storage = folder / "source", make_storage(folder / "home")
    shutil.copytree(undisturbed.source, source)
    with spark_session(SPARK, storage):
        listed = prepare_ingest(settings(source), storage, SPARK)
        (source / "red" / "000.png").rename(folder / "gone.png")
        with _Writer(source / "green" / "000.png", source / "blue" / "000.png"):
            report = ingest_source(settings(source), listed, storage, SPARK)
        # What nobody wrote to is stored; the file that went is not.
        assert listed.listing.num_rows - 3 <= report.stored < listed.listing.num_rows
        (folder / "gone.png").rename(source / "red" / "000.png")
        held = run_and_read(source, storage)
    assert held.without_splits() == undisturbed.held.without_splits()
    # Images that came in two runs are dealt in another order: the fractions hold to one image all the same.
    sizes, wanted = held.split_sizes(), undisturbed.held.split_sizes()
    assert all(abs(sizes[key] - wanted[key]) <= 1 for key in sizes.keys() | wanted.keys()), (sizes, wanted)
    assert leftovers(storage) == []
