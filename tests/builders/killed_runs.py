"""Runs that are disturbed, what they must end with, and what they must not leave."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import MANIFEST, open_cache, read_manifest, verify_files
from tasks.etl.staging import MARK
from tasks.refs import CacheRef
from tasks.schema import DELETED, FILES, IMAGES, SPLITS
from tasks.spark.failure import SparkFailed
from tasks.spark.session import spark_session
from tasks.storage import Storage
from tasks.tables import delta, snapshots
from tests.builders.etl_and_cache import SPARK, make_storage, run
from tests.builders.processes import ROOT
from tests.conftest import write_images

PART_NAME = re.compile(r"part-\d{5}-[0-9a-f]{32}-[0-9a-f]{12}\.parquet")

LIVENESS_SECONDS = 240
"""Nothing here takes so long: what does has hung."""

Row = tuple[str, ...]


IMAGES_LABEL, IMAGES_SPLIT = (IMAGES.fieldNames().index(name) for name in ("label", "split"))
FILES_SPLIT = FILES.fieldNames().index("split")


@dataclass(frozen=True)
class Held:
    """What tables and cache hold, without the times at which it was written."""

    images: frozenset[Row]
    files: frozenset[Row]
    cache: frozenset[Row]

    def without_splits(self) -> "Held":
        """Return the same but for splits, and for the rows' order in the cache, which follows from them."""
        images = frozenset((*row[:IMAGES_SPLIT], *row[IMAGES_SPLIT + 1 :]) for row in self.images)
        files = frozenset((*row[:FILES_SPLIT], *row[FILES_SPLIT + 1 :]) for row in self.files)
        return Held(images, files, frozenset(row[2:] for row in self.cache))

    def split_sizes(self) -> Counter[tuple[str, str]]:
        """Return how many images each label has in each split."""
        return Counter((row[IMAGES_LABEL], row[IMAGES_SPLIT]) for row in self.images)


@dataclass(frozen=True)
class Undisturbed:
    """A source, and what an undisturbed run makes of it."""

    source: Path
    held: Held


def run_undisturbed(folder: Path, per_class: int) -> Undisturbed:
    """Make a source, and run once."""
    source = folder / "source"
    write_images(source, per_class, side=128)
    return Undisturbed(source, run_and_read(source, make_storage(folder / "undisturbed")))


def run_and_read(source: Path, storage: Storage) -> Held:
    """Run both stages in this process; return what is there then."""
    with spark_session(SPARK, storage):
        return read_held(storage, run(source, storage))


def read_held(storage: Storage, ref: CacheRef) -> Held:
    """Read the newest tables, and every byte and every image of the cache."""
    with spark_session(SPARK, storage) as spark:
        images, files = (
            snapshots.read_version(spark, snapshots.latest(spark, storage.table(n))) for n in ("images", "files")
        )
        image_rows, paths = images.drop("ingested_at").collect(), files.drop("seen_at", "modified_at").collect()
    stored = [
        (*map(str, (row | {"content": hashlib.sha256(row["content"]).hexdigest()}).values()),)
        for row in (image.asDict() for image in image_rows)
    ]
    assert len(set(stored)) == len(stored)
    # Of a file that went away before the first undisturbed run, nobody else knows.
    known = [tuple(map(str, row)) for row in paths if row["outcome"] != DELETED]
    return Held(frozenset(stored), frozenset(known), _read_cache(ref))


def _read_cache(ref: CacheRef) -> frozenset[Row]:
    manifest = open_cache(ref)
    verify_files(ref.url, manifest)
    return frozenset(
        (split, str(row), manifest.classes[label], hashlib.sha256(pixels.numpy().tobytes()).hexdigest())
        for split in SPLITS
        for batch in CacheLoader(ref.url, manifest, split, batch_size=32).epoch(0)
        for pixels, label, row in zip(batch.inputs, batch.labels_B.tolist(), batch.rows_B.tolist(), strict=True)
    )


def start_run(source: Path, storage: Storage, log: Path) -> subprocess.Popen[str]:
    """Start both stages in a process of its own, which leads a session."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.builders.etl_and_cache", str(source), storage.home],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def end_run(process: subprocess.Popen[str], log: Path) -> str:
    """Wait until the run and every process of it is gone; return what it said."""
    try:
        process.wait(LIVENESS_SECONDS)
        deadline = time.monotonic() + LIVENESS_SECONDS
        while members := _session(process.pid):
            assert time.monotonic() < deadline, f"left running: {members}"
            time.sleep(0.1)
    finally:
        for member in _session(process.pid):
            member.kill()
    return log.read_text(errors="replace")


def _session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def _workers(members: list[psutil.Process]) -> list[psutil.Process]:
    """Return the Python workers of Spark: the daemon's children."""
    found = []
    for member in members:
        try:
            if "pyspark.daemon" in " ".join(member.parent().cmdline()):
                found.append(member)
        except (psutil.NoSuchProcess, AttributeError):
            continue  # It ended while it was looked at.
    return found


VICTIMS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "driver": lambda members: [member for member in members if member.pid == os.getsid(member.pid)],
    "worker": _workers,
    "jvm": lambda members: [member for member in members if member.name() == "java"],
}

MOMENTS: dict[str, Callable[[Storage, list[psutil.Process]], bool]] = {
    "reading": lambda storage, members: bool(_workers(members)),
    "images": lambda storage, members: any(Path(storage.table("images")).glob("part-*")),
    "files": lambda storage, members: any(Path(storage.table("files")).glob("part-*")),
    "building": lambda storage, members: any(Path(storage.cache).glob("*/*.parquet")),
}
"""What can be seen from outside when a stage is at it: images are read, a table or the cache is written."""


def kill_in(process: subprocess.Popen[str], victim: str, moment: str, storage: Storage, seconds: float) -> bool:
    """Kill the victim without a chance to say anything, so long after the moment began; say whether it was there."""
    while process.poll() is None:
        try:
            members = _session(process.pid)
            if not MOMENTS[moment](storage, members):
                time.sleep(0.01)
                continue
            time.sleep(seconds)
            found = VICTIMS[victim](_session(process.pid))
            for killed in found[:1]:
                killed.kill()
        except psutil.NoSuchProcess:
            continue  # It ended while it was looked at.
        return bool(found)
    return False


def check_killed_workers(source: Path, storage: Storage) -> None:
    """Python workers of this process's session are killed as they come: the run fails, the session lives."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.01):
            for worker in _workers(psutil.Process().children(recursive=True)):
                worker.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(SparkFailed, match="^a Python worker of Spark was killed"):
            run(source, storage)
    finally:
        stop.set()
        killer.join()


def check_killed(undisturbed: Undisturbed, home: Path, victim: str, moment: str, seconds: float) -> None:
    """Kill the victim so long after the moment began: a plain run ends like an undisturbed one, and nothing is left."""
    storage = make_storage(home)
    if not _run_and_kill(undisturbed.source, storage, victim, moment, seconds):
        # The moment was over before so many seconds were: an undisturbed run, which shows nothing.
        storage = make_storage(home.with_name(f"{home.name}-at-once"))
        assert _run_and_kill(undisturbed.source, storage, victim, moment, seconds=0)
    check_made_good(undisturbed, storage)


def _run_and_kill(source: Path, storage: Storage, victim: str, moment: str, seconds: float) -> bool:
    """Run, and kill the victim; say whether it was there to be killed, the driver with a session."""
    log = Path(storage.home) / "run.log"
    process = start_run(source, storage, log)
    killed = kill_in(process, victim, moment, storage, seconds)
    said = end_run(process, log)
    last = said.splitlines()[-1] if said else "nothing"
    print(f"{victim} killed {seconds:.2f} s into {moment}: {killed}; status {process.returncode}, said last: {last}")
    if not killed:
        assert process.returncode == 0, said
    elif victim == "driver":
        assert process.returncode == -signal.SIGKILL, said
        return bool(session_folders(storage))
    return killed


def check_made_good(undisturbed: Undisturbed, storage: Storage) -> None:
    """No half cache is there; a plain run ends like an undisturbed one, and nothing is left.

    It has a process, and so a session, of its own: that session's start is what removes the folder of a killed one.
    """
    check_no_half_cache(storage)
    log = Path(storage.home) / "again.log"
    again = start_run(undisturbed.source, storage, log)
    said = end_run(again, log)
    assert again.returncode == 0, said
    assert leftovers(storage) == []
    assert run_and_read(undisturbed.source, storage) == undisturbed.held


def session_folders(storage: Storage) -> list[Path]:
    """Return the folders of temporary files of Spark's sessions, the running and the killed ones."""
    return [path for path in (Path(storage.home) / "spark-temp").glob("*") if path.is_dir()]


def check_no_half_cache(storage: Storage) -> None:
    """Every cache that has a manifest is whole."""
    for manifest in Path(storage.cache).glob(f"*/{MANIFEST}"):
        url = str(manifest.parent)
        found = read_manifest(url)
        assert found is not None
        verify_files(url, found)


def leftovers(storage: Storage) -> list[str]:
    """Return the temporary files below the run's home; data files of Spark's own that no commit names are VACUUM's."""
    home = Path(storage.home)
    caches = {manifest.parent for manifest in Path(storage.cache).glob(f"[!.]*/{MANIFEST}")}
    named = {cache / MANIFEST for cache in caches}
    for cache in caches:
        manifest = read_manifest(str(cache))
        assert manifest is not None
        named |= {cache / file.name for split in manifest.splits.values() for file in split.files}
    left = [path for path in Path(storage.cache).rglob("*") if path.is_file() and path not in named]
    left = [path for path in left if path.suffix not in {".lock", ".used"}]
    left += [path for path in Path(storage.tables).rglob("*") if path.name.endswith(".tmp")]
    for table in (Path(storage.table("images")), Path(storage.table("files"))):
        left += list(table.glob(f"_delta_log/{MARK}*"))
        parts = (path for path in table.glob("part-*") if PART_NAME.fullmatch(path.name))
        left += [path for path in parts if path.name not in delta.added_since(str(table), None)]
    left += [path for path in home.glob("spark-temp/*") if path.name != ".lock"]
    return sorted(str(path.relative_to(home)) for path in left)
