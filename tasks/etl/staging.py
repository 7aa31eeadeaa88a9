"""Uncommitted parts in a table's folder: selected for a commit, or removed, also those of a killed run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.errors import WrongInput
from tasks.etl.outcomes import Comparison
from tasks.object_store import file_system, list_names
from tasks.system.locks import excludes_other_machines
from tasks.tables import delta
from tasks.tables.committing import is_unsure
from tasks.tables.parts import REWRITTEN, PartTarget, make_rewriter
from tasks.tables.rewriting import map_files

CHANGE_FOLDER = "_change_data"
"""Folder of the files of the change data feed, in which a killed run of an older release may have left some."""

MARKER = "_unfinished-"
"""Prefix of a marker file, with version and run: the run's parts in the table's folder may be uncommitted.

The marker is in the table's log folder, where readers of the table and VACUUM ignore it.
"""


@contextmanager
def staged_parts(path: str, version: int | None) -> Iterator[PartTarget]:
    """Yield the target for the parts of a run's workers; on exit, remove those that were not committed.

    The caller has an exclusive lock on the table, so on a local disk the parts of killed runs are removed, too. Where
    file locks do not exclude all writers, another run that wrote parts may be active: they are left to VACUUM.

    Args:
        path: Path or URL of the table.
        version: The table's version, None if it does not exist yet.
    """
    filesystem, root = file_system(path)
    target = PartTarget(path, uuid4().hex, datetime.now(UTC))
    if version is None:
        # Markers stay until this run ends: late tasks of a failed run may still write parts.
        delta.clear_uncommitted(path, keep=MARKER)
    filesystem.makedirs(f"{root}/_delta_log", exist_ok=True)
    _sweep(path, target.run, done=False, others=not is_unsure(path))
    try:
        filesystem.touch(f"{root}/_delta_log/{MARKER}{-1 if version is None else version}-{target.run}")
        yield target
    except WrongInput:
        _sweep(path, target.run, done=True)
        raise
    except BaseException:
        # Tasks of a failed job may still write for a moment: the marker stays for the next run. If the lock was lost,
        # another run may be writing parts of its own. A commit that may still be under way would name removed parts.
        if not is_unsure(path):
            _sweep(path, target.run, done=False, others=False)
        raise
    _sweep(path, target.run, done=True)


def is_swept(path: str) -> bool:
    """Return whether the table's log has no marker of a run, or `sweep_killed_runs` would leave them."""
    return not _markers(path) or not excludes_other_machines(path)


def _markers(path: str) -> list[str]:
    """Return the names of the marker files in the table's log."""
    return [name for name in list_names(f"{path}/_delta_log") if name.startswith(MARKER)]


def sweep_killed_runs(path: str) -> None:
    """Remove the uncommitted parts of killed runs from a local table that is up to date.

    They exist if a run's driver was killed and its JVM continued. The caller has an exclusive lock on the table.
    """
    if excludes_other_machines(path):
        _sweep(path, None, done=True)


def _sweep(path: str, own: str | None, *, done: bool, others: bool = True) -> None:
    """Remove uncommitted parts of this run and, on a local disk with `others`, of other runs.

    Args:
        path: Path or URL of the table.
        own: Name of this run; None if it writes no parts.
        done: Whether this run writes no more parts; if so, the markers are removed, too.
        others: Whether this run has the exclusive lock, so that parts of other runs are those of killed ones.
    """
    filesystem, root = file_system(path)
    for marker in _markers(path):
        version, run = marker.removeprefix(MARKER).rsplit("-", 1)
        if run != own and not (others and excludes_other_machines(path)):
            continue
        committed = delta.added_since(path, None if version == "-1" else int(version))
        for folder in ("", f"{CHANGE_FOLDER}/"):
            if folder and not filesystem.exists(f"{root}/{folder}"):
                continue
            for found in filesystem.ls(f"{root}/{folder}", detail=False):
                name = found.rsplit("/", 1)[-1]
                if f"-{run}-" in name and f"{folder}{name}" not in committed:
                    filesystem.rm(found)
        if done:
            filesystem.rm(f"{root}/_delta_log/{marker}")
    if done:
        delta.clear_uncommitted(path)


@dataclass(frozen=True)
class ChosenParts:
    """Parts to commit, with their numbers of rows.

    Attributes:
        new: Parts whose images are all new to the table.
        moved: Parts with at least one image that the table has under another label or split.
    """

    new: dict[str, int]
    moved: dict[str, int]


def choose_parts(spark: SparkSession, compared: Comparison, target: PartTarget) -> ChosenParts:
    """Return parts that contain exactly the images to insert.

    Parts with other images too (a duplicate in another part, a conflict, an image in the table) are rewritten without
    them. Parts with images whose assigned split differs from the split in the part are rewritten as well.
    """
    edits, moving = compared.edits(), compared.parts_with_moved()
    done = [(part, rows, part) for part, rows in edits.whole.items()]
    for batch in edits.batches():
        again = pa.Table.from_batches([batch])
        rewritten = map_files(spark, target.folder, again, make_rewriter(target), REWRITTEN)
        done += [(row["part"], row["rows"], row["was"]) for row in rewritten]
    chosen = ChosenParts({}, {})
    for part, rows, was in done:
        (chosen.moved if was in moving else chosen.new)[part] = rows
    return chosen
