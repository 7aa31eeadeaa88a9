"""ETL and cache runs in processes that a test kills, and readers of the data that they leave."""

import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import MANIFEST, CacheDamaged, open_cache, read_manifest, verify_files
from tasks.etl.commits import MARKER
from tasks.refs import SPLITS, CacheRef
from tasks.schema import DELETED, FILES, IMAGES
from tasks.spark.session import spark_session
from tasks.storage import Storage
from tasks.tables import delta, snapshots
from tests.builders.etl_and_cache import SPARK, make_storage, run
from tests.builders.processes import ROOT
from tests.conftest import write_images

PART_NAME = re.compile(r"part-\d{5}-[0-9a-f]{32}-[0-9a-f]{12}\.parquet")

LIVENESS_SECONDS = 240
"""A process that is still running after this time hangs."""

Row = tuple[str, ...]


IMAGES_LABEL, IMAGES_SPLIT = (IMAGES.fieldNames().index(name) for name in ("label", "split"))
FILES_SPLIT = FILES.fieldNames().index("split")


@dataclass(frozen=True)
class Contents:
    """Contents of tables and cache, without the times at which they were written."""

    images: tuple[Row, ...]
    """Sorted; not a set, which would hide an image that is stored twice."""
    files: frozenset[Row]
    cache: frozenset[Row]

    def duplicate_images(self) -> list[Row]:
        """Return the rows of images that are stored more than once."""
        return [row for row, number in Counter(self.images).items() if number > 1]

    def without_splits(self) -> "Contents":
        """Return the contents without splits, and without the order of rows in the cache, which depends on them."""
        images = tuple(sorted((*row[:IMAGES_SPLIT], *row[IMAGES_SPLIT + 1 :]) for row in self.images))
        files = frozenset((*row[:FILES_SPLIT], *row[FILES_SPLIT + 1 :]) for row in self.files)
        return Contents(images, files, frozenset(row[2:] for row in self.cache))

    def split_sizes(self) -> Counter[tuple[str, str]]:
        """Return the number of images per label and split."""
        return Counter((row[IMAGES_LABEL], row[IMAGES_SPLIT]) for row in self.images)


@dataclass(frozen=True)
class UndisturbedRun:
    """A source, and the contents of tables and cache after an undisturbed run on it."""

    source: Path
    contents: Contents


def run_undisturbed(folder: Path, per_class: int) -> UndisturbedRun:
    """Write a source of images, and run both stages on it once."""
    source = folder / "source"
    write_images(source, per_class, side=128)
    return UndisturbedRun(source, run_and_read(source, make_storage(folder / "undisturbed")))


def run_and_read(source: Path, storage: Storage) -> Contents:
    """Run both stages in this process, and return the contents of tables and cache."""
    with spark_session(SPARK, storage):
        return read_contents(storage, run(source, storage))


def read_contents(storage: Storage, ref: CacheRef) -> Contents:
    """Read the newest tables, and every byte and every image of the cache."""
    with spark_session(SPARK, storage) as spark:
        images, files = (
            snapshots.read_version(spark, snapshots.latest(spark, storage.table(n))) for n in ("images", "files")
        )
        image_rows, paths = (
            images.drop("ingested_at").collect(),
            files.drop("seen_at", "modified_at", "changed_at", "inode").collect(),
        )
    stored = [
        (*map(str, (row | {"content": hashlib.sha256(row["content"]).hexdigest()}).values()),)
        for row in (image.asDict() for image in image_rows)
    ]
    # Only the disturbed run saw a file that was deleted before the undisturbed run.
    known = [tuple(map(str, row)) for row in paths if row["outcome"] != DELETED]
    return Contents(tuple(sorted(stored)), frozenset(known), _read_cache(ref))


def _read_cache(ref: CacheRef) -> frozenset[Row]:
    manifest = open_cache(ref)
    verify_files(ref.url, manifest)
    return frozenset(
        (split, str(row), manifest.classes[label], hashlib.sha256(pixels.numpy().tobytes()).hexdigest())
        for split in SPLITS
        for batch in CacheLoader(ref.url, manifest, split, batch_size=32).epoch(0)
        for pixels, label, row in zip(batch.inputs, batch.labels_B.tolist(), batch.rows_B.tolist(), strict=True)
    )


@dataclass(frozen=True)
class StartedRun:
    """A run in its own process, which leads a session, and the file that has its output."""

    process: subprocess.Popen[str]
    log: Path


@dataclass(frozen=True)
class EndedRun:
    """The exit status of a run, its output, and the processes that it left running."""

    returncode: int
    output: str
    left_running: list[str]


def start_run(source: Path, storage: Storage, log: Path) -> StartedRun:
    """Start both stages in their own process, which leads a session."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.builders.etl_and_cache", str(source), storage.home],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    return StartedRun(process, log)


def end_run(started: StartedRun) -> EndedRun:
    """Wait until the run and all its processes have ended, and kill those that have not after `LIVENESS_SECONDS`.

    Raises:
        subprocess.TimeoutExpired: The run itself did not end in that time.
    """
    leader = started.process.pid
    try:
        started.process.wait(LIVENESS_SECONDS)
        deadline = time.monotonic() + LIVENESS_SECONDS
        while (members := _session(leader)) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for member in _session(leader):
            member.kill()
    output = started.log.read_text(errors="replace")
    return EndedRun(started.process.returncode, output, [str(member) for member in members])


def run_to_end(source: Path, storage: Storage) -> EndedRun:
    """Run both stages in their own process.

    Its session is a new one: the start of a session removes the temporary folder of a killed one.
    """
    return end_run(start_run(source, storage, Path(storage.home) / "again.log"))


def _session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


DAEMONS = frozenset({"tasks.spark.python_daemon", "pyspark.daemon"})
"""Modules of the processes from which Spark forks its Python workers: of a local session, and of one on a cluster."""


def _workers(members: list[psutil.Process]) -> list[psutil.Process]:
    """Return the Python workers of Spark, which are the children of its daemon."""
    found = []
    for member in members:
        try:
            if not DAEMONS.isdisjoint(member.parent().cmdline()):
                found.append(member)
        except (psutil.NoSuchProcess, AttributeError):
            continue  # The process ended meanwhile.
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
"""Moments of a run by their signs outside of it: images are read, a table or the cache is written."""


def kill_in(started: StartedRun, victim: str, moment: str, storage: Storage, seconds: float) -> bool:
    """Kill the victim with SIGKILL, `seconds` after the moment began; return whether it was running."""
    while started.process.poll() is None:
        try:
            members = _session(started.process.pid)
            if not MOMENTS[moment](storage, members):
                time.sleep(0.01)
                continue
            time.sleep(seconds)
            found = VICTIMS[victim](_session(started.process.pid))
            for killed in found[:1]:
                killed.kill()
        except psutil.NoSuchProcess:
            continue  # The process ended meanwhile.
        return bool(found)
    return False


def kill_after(started: StartedRun, victim: str, seconds: float) -> bool:
    """Kill the victim with SIGKILL after so many seconds, or as soon as there is one; return whether there was one."""
    time.sleep(seconds)
    while started.process.poll() is None:
        try:
            for killed in VICTIMS[victim](_session(started.process.pid))[:1]:
                killed.kill()
                return True
        except psutil.NoSuchProcess:
            continue  # The process ended meanwhile.
        time.sleep(0.01)
    return False


@contextmanager
def killing_workers() -> Iterator[None]:
    """Kill every Python worker that the Spark session of this process starts."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.01):
            for worker in _workers(psutil.Process().children(recursive=True)):
                worker.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()


def run_and_kill(source: Path, storage: Storage, victim: str, moment: str, seconds: float) -> tuple[bool, EndedRun]:
    """Run both stages, and kill the victim `seconds` after the moment began.

    Returns:
        Whether the victim was running, and the run after its end.
    """
    started = start_run(source, storage, Path(storage.home) / "run.log")
    killed = kill_in(started, victim, moment, storage, seconds)
    ended = end_run(started)
    last = ended.output.splitlines()[-1] if ended.output else "none"
    print(f"{victim} killed {seconds:.2f} s into {moment}: {killed}; status {ended.returncode}, last line: {last}")
    return killed, ended


def session_folders(storage: Storage) -> list[Path]:
    """Return the temporary folders of Spark's sessions, both running and killed."""
    return [path for path in (Path(storage.home) / "spark-temp").glob("*") if path.is_dir()]


def damaged_caches(storage: Storage) -> list[str]:
    """Return one message for each cache that has a manifest and is incomplete or damaged."""
    messages = []
    for path in Path(storage.cache).glob(f"*/{MANIFEST}"):
        manifest = read_manifest(str(path.parent))
        if manifest is None:
            messages.append(f"{path} cannot be read")
            continue
        try:
            verify_files(str(path.parent), manifest)
        except CacheDamaged as error:
            messages.append(str(error))
    return messages


def leftovers(storage: Storage) -> list[str]:
    """Return the temporary files below the run's home.

    Data files of Spark's own that no commit names are left to VACUUM, and are not among them.
    """
    home = Path(storage.home)
    named: set[Path] = set()
    for path in Path(storage.cache).glob(f"[!.]*/{MANIFEST}"):
        manifest = read_manifest(str(path.parent))
        # All files of a cache whose manifest cannot be read are leftovers.
        if manifest is not None:
            named |= {path, *(path.parent / file.name for split in manifest.splits.values() for file in split.files)}
    left = [path for path in Path(storage.cache).rglob("*") if path.is_file() and path not in named]
    left = [path for path in left if path.suffix not in {".lock", ".used"}]
    left += [path for path in Path(storage.tables).rglob("*") if path.name.endswith(".tmp")]
    for table in (Path(storage.table("images")), Path(storage.table("files"))):
        left += list(table.glob(f"_delta_log/{MARKER}*"))
        parts = (path for path in table.glob("part-*") if PART_NAME.fullmatch(path.name))
        left += [path for path in parts if path.name not in delta.added_since(str(table), None)]
    left += [path for path in home.glob("spark-temp/*") if path.name != ".lock"]
    return sorted(str(path.relative_to(home)) for path in left)
