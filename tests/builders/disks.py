"""Disks that are full or read-only: small ones of a test's own, which only root can have."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tasks.cache.materialize import materialize_cache
from tasks.errors import DiskFull, WrongInput
from tasks.etl.ingest import ingest_images
from tasks.etl.staging import MARK
from tasks.refs import TableRef
from tasks.spark.session import spark_session
from tasks.storage import Storage
from tasks.tables import snapshots
from tests.builders.etl_and_cache import CACHE, SPARK, settings
from tests.builders.killed_runs import MOMENTS, Undisturbed, leftovers, run_and_read


class Disk:
    """A mounted tmpfs with everything that a run writes but its logs and Spark's temporary files."""

    def __init__(self, folder: Path, home: Storage) -> None:
        self.folder = folder
        self.storage = home.model_copy(update={"tables": f"{folder}/tables", "cache": f"{folder}/cache"})

    def remount(self, *options: str) -> None:
        """Give it another size, or make it read-only."""
        subprocess.run(["mount", "-o", ",".join(("remount", *options)), self.folder], check=True)


@contextmanager
def mounted_disk(folder: Path, home: Storage, kilobytes: int) -> Iterator[Disk]:
    """Mount a disk of this size; skip the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the command mount, for a disk that can be full or read-only")
    if done.returncode:
        pytest.skip(f"needs root and a mount, for a disk that can be full or read-only: {done.stderr.strip()}")
    try:
        yield Disk(folder, home)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def check_read_only(disk: Disk, source: Path) -> None:
    """Both stages are refused before there is a session, in one sentence."""
    disk.remount("ro")
    with pytest.raises(WrongInput, match=r"storage.tables is '.*', where nothing can be written \(Read-only"):
        ingest_images(settings(source), disk.storage, SPARK)
    with pytest.raises(WrongInput, match=r"storage.cache is '.*', where nothing can be written \(Read-only"):
        materialize_cache(CACHE, TableRef(path="nowhere", version=0), disk.storage, SPARK)
    disk.remount("rw")
    assert list(disk.folder.iterdir()) == []


def check_full_in_etl(disk: Disk, source: Path) -> None:
    """The tables are not there: nothing of them is left either, but an empty file for the next run to sweep by.

    And what it says the next run is to sweep: a task of the job that failed may still have been writing.
    """
    with pytest.raises(DiskFull, match=r"a disk was full .*'.*/tables' has [\d.]+ MB free") as raised:
        ingest_images(settings(source), disk.storage, SPARK)
    assert "\n" not in str(raised.value)
    left = [path.name for path in disk.folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    runs = [name.rsplit("-", 1)[1] for name in left if name.startswith(MARK)]
    assert [name for name in left if not any(f"-{run}" in name for run in runs)] == []


def check_full_in_growth(disk: Disk, undisturbed: Undisturbed, free_kilobytes: int) -> None:
    """The tables are there, and as they were; with room made, they have what an undisturbed run has."""
    source, aside = disk.folder.with_name("grown"), disk.folder.with_name("aside")
    shutil.copytree(undisturbed.source, source)
    aside.mkdir()
    later = [file for file in sorted(source.glob("*/*")) if int(file.stem) % 3]
    for file in later:
        file.rename(aside / f"{file.parent.name}-{file.name}")
    images = ingest_images(settings(source), disk.storage, SPARK).images
    for file in later:
        (aside / f"{file.parent.name}-{file.name}").rename(file)
    disk.remount(f"size={(shutil.disk_usage(disk.folder).used >> 10) + free_kilobytes}k")
    with pytest.raises(DiskFull, match=r"a disk was full .*'.*/tables' has [\d.]+ MB free"):
        ingest_images(settings(source), disk.storage, SPARK)
    with spark_session(SPARK, disk.storage) as spark:
        assert snapshots.latest(spark, images.path) == images
    disk.remount("size=20m")
    assert run_and_read(source, disk.storage) == undisturbed.held
    assert leftovers(disk.storage) == []


def _fill_while_building(disk: Disk) -> None:
    while not MOMENTS["building"](disk.storage, []):
        time.sleep(0.005)
    with (disk.folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def check_full_in_cache(disk: Disk, undisturbed: Undisturbed) -> None:
    """Somebody else fills the disk while the cache is written; when they are gone, it is built."""
    images = ingest_images(settings(undisturbed.source), disk.storage, SPARK).images
    filler = threading.Thread(target=_fill_while_building, args=(disk,))
    filler.start()
    with pytest.raises(DiskFull, match=r"a disk was full .*'.*/cache' has [\d.]+ MB free"):
        materialize_cache(CACHE, images, disk.storage, SPARK)
    filler.join()
    (disk.folder / "filler").unlink()
    assert [path for path in Path(disk.storage.cache).rglob("*") if path.is_dir()] == []
    assert run_and_read(undisturbed.source, disk.storage) == undisturbed.held
    assert leftovers(disk.storage) == []
