"""The home folder of runs: made for its owner alone, also where an earlier version left it open to others."""

import os
import stat
from pathlib import Path

from tasks.errors import WrongInput

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600

SHARING = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH
"""Bits of a folder that a user has set up for several people."""

FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO

MADE_BEFORE = frozenset(
    {
        *("artifacts", "bench", "cache", "checkpoints", "digits", "logs", "prefect", "spark-temp", "spark-warehouse"),
        *("studies", "summary.json", "tables"),
        *(f"mlflow.db{suffix}" for suffix in ("", "-journal", "-wal", "-shm")),
    }
)
"""What earlier versions, which left their home open to others, have written into it."""

DATABASES = ("mlflow.db", "prefect/prefect.db", "prefect/temporary.db", "studies/studies.db")


def make_home(home: Path) -> str | None:
    """Create the home folder for its owner alone; close one that is there to others, and return a line that says so.

    A folder is closed only where this user owns it, nobody else may write to it, and it holds nothing that runs have
    not written. Any other is the user's, who may share it: it stays as it is. Its databases are closed all the same,
    unless others may write to it.
    """
    home.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    if is_shared(home):
        return None
    closed = [path for name in DATABASES for path in _with_its_logs(home / name) if _close(path, PRIVATE_FILE)]
    if all(entry.name in MADE_BEFORE for entry in home.iterdir()) and _close(home, PRIVATE_FOLDER):
        return f"'{home}' was open to other users of this machine: now it is its owner's alone"
    if closed:
        names = ", ".join(path.relative_to(home).as_posix() for path in closed)
        return f"'{home}' had files open to other users of this machine: now they are their owner's alone ({names})"
    return None


def is_shared(home: Path) -> bool:
    """Return whether a home is another user's, or one that others may write to."""
    status = home.stat()
    return status.st_uid != os.geteuid() or bool(status.st_mode & SHARING)


def make_private_folder(folder: Path) -> None:
    """Create a folder for its owner alone, or close one that is there.

    Raises:
        WrongInput: Another user owns it, or its file system leaves it open to others.
    """
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    owners = {folder.lstat().st_uid, folder.stat().st_uid}  # a link may be one user's, what it leads to another's
    if owners == {os.geteuid()}:
        _close(folder, PRIVATE_FOLDER)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & FOR_OTHERS:
            return
        found = f"is open to other users (mode {mode:04o})"
    else:
        found = "belongs to another user"
    raise WrongInput(
        f"'{folder}' {found}, who could read the login in it or plant one: "
        "set LAKEVISION_HOME to a folder of your own, on a file system with permissions"
    )


def make_private_file(file: Path) -> None:
    """Create an empty file that only its owner may read; SQLite makes a database of it, and its logs like it.

    A file that is there and one in a shared home are left as they are.
    """
    if not is_shared(file.parent):
        file.touch(mode=PRIVATE_FILE, exist_ok=True)


def _with_its_logs(database: Path) -> list[Path]:
    paths = [database.with_name(f"{database.name}{suffix}") for suffix in ("", "-journal", "-wal", "-shm")]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _close(path: Path, mode: int) -> bool:
    """Take the rights of other users away; return whether they had any."""
    status = path.stat()
    if not status.st_mode & FOR_OTHERS or status.st_uid != os.geteuid():
        return False
    try:
        path.chmod(mode)
    except OSError:  # Some file systems have no modes of their own.
        return False
    return True
