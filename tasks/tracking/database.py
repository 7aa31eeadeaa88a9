"""The creation of MLflow's SQLite database, which a killed process leaves complete or not at all."""

from contextlib import suppress
from pathlib import Path

import filelock
from mlflow.tracking._tracking_service.utils import _get_store

from tasks.system.home import PRIVATE_FILE, is_shared, make_private_file


def create_database(database: Path, *, private: bool) -> None:
    """Create MLflow's tables in a file with another name, and rename it, unless the database exists.

    SQLite does not undo the changes of a migration whose process is killed, and MLflow can neither use such a database
    nor complete it. Processes that start together wait for the first one.

    Args:
        database: The file.
        private: Whether only its owner may read it, unless the folder is shared.
    """
    if _is_there(database):
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    lock = database.with_name(f"{database.name}.lock")
    # Each user of a shared folder may be the first.
    with filelock.FileLock(lock, mode=PRIVATE_FILE if private and not is_shared(database.parent) else 0o666):
        if not _is_there(database):
            _create(database, private=private)
        with suppress(PermissionError):  # of another user, in a folder that keeps the files of each
            lock.unlink(missing_ok=True)  # A process that waits for it finds the database.


def _create(database: Path, *, private: bool) -> None:
    new = database.with_name(f"{database.name}.new")
    for left in database.parent.glob(f"{new.name}*"):  # by a process that was killed, with SQLite's journal
        left.unlink()
    if private:
        make_private_file(new)
    _get_store(f"sqlite:///{new}").engine.dispose()
    new.replace(database)


def _is_there(database: Path) -> bool:
    return database.is_file() and database.stat().st_size > 0
