"""Temporary files of Spark and DuckDB: one folder per session, removed with it, or by the next after a kill."""

import glob
import shutil
import socket
import tempfile
import uuid
from pathlib import Path

import filelock

from tasks.storage import Storage
from tasks.system.locks import excludes_other_machines


def scratch_root(storage: Storage) -> Path:
    """Return the parent folder of all temporary files of the home."""
    # Spark splits the name of its folder at commas.
    return Path(tempfile.gettempdir() if "," in storage.home else storage.home) / "spark-temp"


class Scratch:
    """A folder for the temporary files of one session, locked as long as its process is alive."""

    def __init__(self, root: Path) -> None:
        """Create the folder in `root`, and remove the folders of dead processes.

        Spark removes its own folder at the end, but none after a kill: spilled images would fill the disk.
        """
        root.mkdir(parents=True, exist_ok=True)
        # A folder exists for a moment before it is locked.
        self._root_lock = filelock.FileLock(root / ".lock")
        with self._root_lock:
            remove_abandoned(root, locks_hold=excludes_other_machines(str(root)))
            self.folder = root / f"{_own_prefix()}{uuid.uuid4().hex}"
            self.folder.mkdir()
            self._lock = filelock.FileLock(f"{self.folder}.lock")
            self._lock.acquire(timeout=0)

    def remove(self) -> None:
        """Remove the folder with its content."""
        with self._root_lock:
            _remove(self.folder, self._lock)


def _own_prefix() -> str:
    return f"{socket.gethostname()}-"


def remove_abandoned(root: Path, *, locks_hold: bool) -> None:
    """Remove the folders of dead processes.

    Args:
        root: Parent folder of all of them.
        locks_hold: Whether locks of other machines are seen here; if not, only folders of this machine are removed.
    """
    # With the whole id: the name of another machine may begin with that of this one.
    folders = root.glob("*" if locks_hold else f"{glob.escape(_own_prefix())}{'[0-9a-f]' * 32}")
    for folder in [path for path in folders if path.is_dir()]:
        lock = filelock.FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue  # Its session is alive.
        _remove(folder, lock)


def _remove(folder: Path, lock: filelock.BaseFileLock) -> None:
    # A JVM that briefly outlives its driver may still add a file, which the next session removes.
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)
