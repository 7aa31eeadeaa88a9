"""Small disks that a test fills or makes read-only; mounting them needs root."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tasks.etl.commits import MARKER
from tasks.etl.ingest import ingest_images
from tasks.refs import TableRef
from tasks.storage import Storage
from tests.builders.etl_and_cache import SPARK, settings
from tests.builders.killed_runs import MOMENTS


class Disk:
    """A mounted tmpfs for everything that a run writes except logs and Spark's temporary files."""

    def __init__(self, folder: Path, home: Storage) -> None:
        self.folder = folder
        self.storage = home.model_copy(update={"tables": f"{folder}/tables", "cache": f"{folder}/cache"})

    def remount(self, *options: str) -> None:
        """Remount the disk with other options: another size, or read-only."""
        subprocess.run(["mount", "-o", ",".join(("remount", *options)), self.folder], check=True)

    def leave_free(self, kilobytes: int) -> None:
        """Shrink the disk to the used space plus `kilobytes`."""
        self.remount(f"size={(shutil.disk_usage(self.folder).used >> 10) + kilobytes}k")

    def files_that_stay(self) -> list[str]:
        """Return the names of files that the next ETL run would not remove.

        It removes the files of the runs that a marker file names: a task of a failed job may still have been writing.
        """
        names = [path.name for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
        runs = [name.rsplit("-", 1)[1] for name in names if name.startswith(MARKER)]
        return [name for name in names if not any(f"-{run}" in name for run in runs)]


@contextmanager
def mounted_disk(folder: Path, home: Storage, kilobytes: int) -> Iterator[Disk]:
    """Mount a disk of this size, or skip the test where that is not allowed."""
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


def ingest_a_third(source: Path, storage: Storage) -> TableRef:
    """Ingest every third file of a source, the others moved away for that time; return the table of images."""
    aside = source.with_name("aside")
    aside.mkdir()
    later = [file for file in sorted(source.glob("*/*")) if int(file.stem) % 3]
    for file in later:
        file.rename(aside / f"{file.parent.name}-{file.name}")
    images = ingest_images(settings(source), storage, SPARK).images
    for file in later:
        (aside / f"{file.parent.name}-{file.name}").rename(file)
    aside.rmdir()
    return images


def fill(filler: Path) -> None:
    """Write to a file until the disk has no room left."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


@contextmanager
def filled_while_building(disk: Disk) -> Iterator[None]:
    """Fill the disk as soon as a file of a cache is there, and free it at the end."""
    stop, filler = threading.Event(), disk.folder / "filler"

    def wait_and_fill() -> None:
        while not MOMENTS["building"](disk.storage, []):
            if stop.wait(0.005):
                return
        fill(filler)

    thread = threading.Thread(target=wait_and_fill)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        filler.unlink(missing_ok=True)
