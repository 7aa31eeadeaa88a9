"""The creation of MLflow's SQLite database, which a killed process leaves complete or not at all."""

from pathlib import Path

import filelock
from mlflow.tracking._tracking_service.utils import _get_store

from tasks.system.home import make_private_file


def create_database(database: Path, *, private: bool) -> None:
    """Create MLflow's tables in a file with another name, and rename it, unless the database exists.

    SQLite does not undo the changes of a migration whose process is killed, and MLflow can neither use such a database
    nor complete it. Processes that start together wait for the first one.

    Args:
        database: The file.
        private: Whether only its owner may read it.
    """
    if _is_there(database):
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(database.with_name(f"{database.name}.lock")):
        if _is_there(database):
            return
        new = database.with_name(f"{database.name}.new")
        for left in database.parent.glob(f"{new.name}*"):  # by a process that was killed, with SQLite's journal
            left.unlink()
        if private:
            make_private_file(new)
        _get_store(f"sqlite:///{new}").engine.dispose()
        new.replace(database)


def _is_there(database: Path) -> bool:
    return database.is_file() and database.stat().st_size > 0
