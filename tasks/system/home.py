"""Permissions of the home folder, accessible to its owner only, and rotation of its logs."""

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from tasks.errors import WrongInput

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600

SHARING = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH
"""Mode bits of a folder that a user has set up for several users."""

FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO

KNOWN_ENTRIES = frozenset(
    {
        *("artifacts", "bench", "cache", "checkpoints", "digits", "logs", "prefect", "spark-temp", "spark-warehouse"),
        *("studies", "summary.json", "tables", "serve", "explanations"),
        *(f"mlflow.db{suffix}" for suffix in ("", "-journal", "-wal", "-shm", ".lock", ".new", ".new-journal")),
    }
)
"""Entries of the home folder of earlier versions, which left it accessible to other users."""

LOGS = ("flows.log", "spark.log")
"""Logs in the home's folder `logs` that runs append to."""

DATABASES = ("mlflow.db", "prefect/prefect.db", "prefect/temporary.db", "studies/studies.db")


def check_home(home: Path, used: tuple[str, ...]) -> None:
    """Check that this user may write to a home, and to what runs of another user may have left in it.

    Args:
        home: The folder, which need not exist.
        used: Beginnings of the names of the entries that the run writes to; other entries may belong to anybody.

    Raises:
        WrongInput: A file or folder cannot be written to; the message names it and its owner.
    """
    found = home
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent  # which the home is made in
    entries = [home / name for name in sorted(KNOWN_ENTRIES) if name.startswith(used)] + [
        home / "logs" / name for name in LOGS
    ]
    for path in (found, *entries):
        mode = os.W_OK | (os.X_OK if os.path.isdir(path) else 0)
        if os.path.exists(path) and not os.access(path, mode, effective_ids=os.access in os.supports_effective_ids):
            raise WrongInput(
                f"storage.home is '{home}', and this user (id {os.geteuid()}) cannot write to '{path}', whose owner "
                f"has the id {path.stat().st_uid}",
                setting="storage.home",
                way_out="give a home of your own (LAKEVISION_HOME), or run as its owner",
            )


def make_home(home: Path) -> str | None:
    """Create the home folder for its owner only, or restrict an existing one; return a log line if that changed it.

    A folder is restricted only if this user owns it, other users cannot write to it, and runs have written all of its
    entries. Any other folder may be shared on purpose, and remains unchanged. Its databases are restricted
    nevertheless, unless other users can write to the folder.
    """
    home.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    if is_shared(home):
        return None
    restricted = [path for name in DATABASES for path in _with_its_logs(home / name) if _restrict(path, PRIVATE_FILE)]
    if all(entry.name in KNOWN_ENTRIES for entry in home.iterdir()) and _restrict(home, PRIVATE_FOLDER):
        return f"'{home}' was open to other users of this machine: now only its owner has access"
    if restricted:
        names = ", ".join(path.relative_to(home).as_posix() for path in restricted)
        return f"'{home}' had files open to other users of this machine: now only their owner has access ({names})"
    return None


def is_shared(home: Path) -> bool:
    """Return whether a home belongs to another user, or other users may write to it."""
    status = home.stat()
    return status.st_uid != os.geteuid() or bool(status.st_mode & SHARING)


def make_private_folder(folder: Path) -> None:
    """Create a folder for its owner only, or restrict an existing one.

    Raises:
        WrongInput: Another user owns it, or its file system cannot restrict it.
    """
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    owners = {folder.lstat().st_uid, folder.stat().st_uid}  # a link and its target may have different owners
    if owners == {os.geteuid()}:
        _restrict(folder, PRIVATE_FOLDER)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & FOR_OTHERS:
            return
        found = f"is open to other users (mode {mode:04o})"
    else:
        found = "belongs to another user"
    raise WrongInput(
        f"'{folder}' {found}, who could read the login in it or plant one",
        way_out="set LAKEVISION_HOME to a folder of your own, on a file system with permissions",
    )


def make_private_file(file: Path) -> None:
    """Create an empty file that only its owner may read; SQLite turns it into a database, with logs of the same mode.

    An existing file and a file in a shared home are left unchanged.
    """
    if not is_shared(file.parent):
        file.touch(mode=PRIVATE_FILE, exist_ok=True)


def _with_its_logs(database: Path) -> list[Path]:
    paths = [database.with_name(f"{database.name}{suffix}") for suffix in ("", "-journal", "-wal", "-shm")]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _restrict(path: Path, mode: int) -> bool:
    """Remove the permissions of other users; return whether they had any."""
    status = path.stat()
    if not status.st_mode & FOR_OTHERS or status.st_uid != os.geteuid():
        return False
    try:
        path.chmod(mode)
    except OSError:  # Some file systems do not support modes.
        return False
    return True


MAX_LOG_BYTES = 50_000_000
"""Size from which on a log is rotated; its former part is kept as NAME.1."""


def rotate(log: Path) -> None:
    """Copy a log that is too long to NAME.1, and empty it: processes that append to it need not open it again.

    If another process does it at this moment, nothing is done: the second copy would be that of the empty log.
    """
    with suppress(OSError), log.open("rb") as held:  # A full disk is reported by the work itself.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if MAX_LOG_BYTES < log.stat().st_size < shutil.disk_usage(log.parent).free:
            shutil.copyfile(log, f"{log}.1")
            os.truncate(log, 0)
