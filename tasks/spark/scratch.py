"""Temporary files of Spark and DuckDB: a folder a session, removed with it, or by the next where that was killed."""

import shutil
import tempfile
import uuid
from pathlib import Path

import filelock

from tasks.storage import Storage


def scratch_root(storage: Storage) -> Path:
    """Return the folder of all temporary files of the home."""
    # Spark takes a comma for the end of a folder's name.
    return Path(tempfile.gettempdir() if "," in storage.home else storage.home) / "spark-temp"


class Scratch:
    """A folder for the temporary files of one session, locked for as long as its process lives."""

    def __init__(self, root: Path) -> None:
        """Make the folder below `root`, and remove those whose process is gone.

        Spark removes its own at the end, but nobody's after a kill: images on their way would fill the disk.
        """
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        with self._one_at_a_time():
            remove_abandoned(root)
            self.folder = root / uuid.uuid4().hex
            self.folder.mkdir()
            self._lock = filelock.FileLock(f"{self.folder}.lock")
            self._lock.acquire(timeout=0)

    def _one_at_a_time(self) -> filelock.BaseFileLock:
        # A folder is there for a moment before it is locked.
        return filelock.FileLock(self._root / ".lock")

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        with self._one_at_a_time():
            _remove(self.folder, self._lock)


def remove_abandoned(root: Path) -> None:
    """Remove the folders whose process is gone."""
    for folder in [path for path in root.glob("*") if path.is_dir()]:
        lock = filelock.FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue  # Its session lives.
        _remove(folder, lock)


def _remove(folder: Path, lock: filelock.BaseFileLock) -> None:
    # A JVM that outlives its driver by a moment may add a file meanwhile: the next session removes that.
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)
