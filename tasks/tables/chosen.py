"""The tables of a run that names none, and those that a user may have meant in place of a missing one."""

import logging
from collections.abc import Iterator
from pathlib import Path

from tasks.config.storage import StorageConfig
from tasks.errors import join_names
from tasks.paths import local_path
from tasks.storage import Storage, resolve_storage

logger = logging.getLogger("lakevision.tables")

NUM_NAMED = 5
"""Maximum number of folders in a message."""


def chosen_tables(config: StorageConfig, table: str | None = None) -> Storage:
    """Return the storage of a run; if no tables are given, those that a run in the home has written to last.

    Only a home knows its runs: tables elsewhere are always named.

    Args:
        config: Settings of the storage.
        table: Another program's table that the run reads; its predictions stay where they are.

    Raises:
        WrongInput: As `resolve_storage`.
    """
    storage = resolve_storage(config)
    if config.tables or table:
        return storage
    newest = max(_with_times(Path(storage.home), "images"), default=None)
    if newest is None or str(newest[1]) == storage.tables:
        return storage
    logger.info("storage.tables is empty: '%s' has the tables of the newest run in this home", newest[1])
    return storage.model_copy(update={"tables": str(newest[1])})


def tables_beside(path: str) -> str:
    """Return a clause that names the folders beside that of a missing table which have it; empty if none has."""
    missing = local_path(path)
    if missing is None:
        return ""
    found = [folder.name for _, folder in sorted(_with_times(missing.parent.parent, missing.name), reverse=True)]
    if not found:
        return ""
    return f"set storage.tables: '{missing.parent.parent}' has {join_names(found[:NUM_NAMED], len(found))}"


def _with_times(parent: Path, table: str) -> Iterator[tuple[int, Path]]:
    """Yield the time of the newest commit, in ns, and the folder, of each folder of tables that has this one."""
    for log in parent.glob(f"*/{table}/_delta_log"):
        times = [commit.stat().st_mtime_ns for commit in log.glob("*.json")]
        if times:
            yield max(times), log.parent.parent
