"""The paths in MLflow's database of a home, which follow the home when it is moved or copied.

MLflow stores every location of artifacts as an absolute URI. A home records its own path in its database. When it is
opened at another path, that one replaces the recorded one, so that files are read and written in this home alone.
"""

import json
import logging
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from tasks.errors import WrongInput
from tasks.paths import local_path
from tasks.storage import artifacts_folder
from tasks.tracking.experiments import TRAINING

logger = logging.getLogger("lakevision.tracking")

HOME_TAG = "lakevision.home"
"""Tag of the experiment of training runs: the path of the home in the locations of its database."""

BUSY_SECONDS = 60
"""Maximum wait for another process that writes to the database."""

# By table: the column, and the rows that are rewritten. A table's source stays, since its models are named by it.
PATHS = (
    ("experiments", "artifact_location", "true"),
    ("runs", "artifact_uri", "true"),
    ("logged_models", "artifact_location", "true"),
    ("model_versions", "source", "true"),
    ("model_versions", "storage_location", "true"),
    ("params", "value", "key IN ('data.table', 'cache.url')"),
    ("tags", "value", "key = 'lakevision.table'"),
    ("logged_model_params", "param_value", "param_key IN ('data.table', 'cache.url')"),
    ("model_version_tags", "value", "key = 'lakevision.table' OR key LIKE 'lakevision.serves.%'"),
    ("datasets", "dataset_source", "true"),
)

RECORDED = """
SELECT experiments.experiment_id, artifact_location, value FROM experiments
LEFT JOIN experiment_tags ON experiment_tags.experiment_id = experiments.experiment_id AND key = ?
WHERE name = ?
"""

LOCATIONS = "SELECT artifact_uri FROM runs UNION ALL SELECT artifact_location FROM logged_models"


def follow_home(database: Path) -> None:
    """Replace the former path of a home in its MLflow database by the present one, in one transaction.

    Args:
        database: The database, in the folder of the home.

    Raises:
        WrongInput: The home was moved or copied, and its database cannot be written.
    """
    home = database.parent
    with closing(sqlite3.connect(database, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        former = _read_former(connection, home)
        if former is None:
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            former = _read_former(connection, home)  # Again, since another process may have been first.
            if former is not None:
                _record(connection, former, home)
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if former is None or _is_same(former, home):
                return  # Nothing is wrong with its paths.
            raise WrongInput(
                f"the home '{home}' was moved or copied from '{former}', and the paths in its database "
                f"'{database.name}' cannot be changed ({error})",
                way_out="make the file and its folder writable",
            ) from None


def _read_former(connection: sqlite3.Connection, home: Path) -> Path | None:
    """Return the home's path in its database; None if that is still valid or the experiment is missing."""
    found = connection.execute(RECORDED, (HOME_TAG, TRAINING.name)).fetchone()
    if found is None:
        return None
    _, location, recorded = found
    if recorded is None or not Path(recorded).is_absolute():
        return _guess_former(connection, location, home)
    return None if _is_same(Path(recorded), home) else Path(recorded)


def _guess_former(connection: sqlite3.Connection, location: str, home: Path) -> Path:
    """Return the home's path in the database of a release that did not record it; `home` if it was not moved.

    Artifacts are in `artifacts` in the home, unless a setting chose another folder. Such a folder is distinguished by
    the files: those of a moved home are in its own `artifacts`.
    """
    folder = _path_of(location)
    if folder is None or str(folder) != artifacts_folder(str(folder.parent)):
        return home
    found = [path.relative_to(folder) for (uri,) in connection.execute(LOCATIONS)
             if (path := _path_of(uri)) is not None and path.is_relative_to(folder)]  # fmt: skip
    own = Path(artifacts_folder(str(home)))
    is_here = any((own / path).exists() for path in found)
    if not found or is_here or _is_same(folder.parent, home) or (not folder.is_dir() and own.is_dir()):
        return folder.parent
    return home


def _path_of(uri: str | None) -> Path | None:
    """Return the folder of a file URI, or None for any other location."""
    with suppress(WrongInput):
        return local_path(uri) if uri else None
    return None


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two paths name one folder, such as by a symbolic link."""
    with suppress(OSError):
        return one == other or one.samefile(other)
    return False


def _record(connection: sqlite3.Connection, former: Path, home: Path) -> None:
    """Replace the former path and record the present one; if both name one folder, record the former one."""
    if not _is_same(former, home):
        connection.create_function("moved", 1, lambda text: _moved(text, former, home), deterministic=True)
        for table, column, rows in PATHS:
            connection.execute(
                f"UPDATE {table} SET {column} = moved({column}) WHERE {column} <> moved({column}) AND ({rows})"  # noqa: S608  # names of PATHS
            )
        logger.info("the home '%s' was at '%s': the paths in its MLflow database are replaced", home, former)
        former = home
    connection.execute(
        "INSERT OR REPLACE INTO experiment_tags (key, value, experiment_id) "
        "SELECT ?, ?, experiment_id FROM experiments WHERE name = ?",
        (HOME_TAG, str(former), TRAINING.name),
    )


def _moved(text: str | None, former: Path, home: Path) -> str | None:
    """Return a path, a file URI, or a JSON object with a `path`, with the new home in place of the former one."""
    if text is None:
        return None
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except ValueError:
            return text
        path = value.get("path")
        moved = _moved(path, former, home) if isinstance(path, str) else path
        return text if moved == path else json.dumps(value | {"path": moved})
    for old, new in ((str(former), str(home)), (former.as_uri(), home.as_uri())):
        if text == old or text.startswith(f"{old}/"):
            return new + text[len(old) :]
    return text
