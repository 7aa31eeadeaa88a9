"""Parts of a table that lie in its folder and nobody committed yet: chosen, committed, or removed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

import fsspec
import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.errors import WrongInput
from tasks.etl.outcomes import Comparison
from tasks.paths import local_path
from tasks.tables import delta
from tasks.tables.cut import CHANGE_FOLDER
from tasks.tables.parts import REWRITE_ARROW, REWRITTEN, PartTarget, make_rewriter
from tasks.tables.rewriting import map_files

MARK = "_unfinished-"
"""A file of this name in the table's log, with version and run, says that a run's parts may lie there uncommitted.

The log is where no reader of the table, and no VACUUM, looks at it.
"""


@contextmanager
def staged_parts(path: str, version: int | None) -> Iterator[PartTarget]:
    """Yield where a run's workers write their parts; afterwards only those that it committed are there.

    The caller has the table to itself, so on a local disk what killed runs left is removed, too. An object store has no
    turns, and another run's parts may be of one that goes on: there they are left to VACUUM.

    Args:
        path: Path or URL of the table.
        version: The table's version, None where there is none yet.
    """
    filesystem, root = fsspec.core.url_to_fs(path)
    target = PartTarget(path, uuid4().hex, datetime.now(UTC))
    if version is None and local_path(path) is not None:
        delta.clear_uncommitted(path)
    filesystem.makedirs(f"{root}/_delta_log", exist_ok=True)
    _sweep(path, target.run, done=False)
    try:
        filesystem.touch(f"{root}/_delta_log/{MARK}{-1 if version is None else version}-{target.run}")
        yield target
    except WrongInput:
        _sweep(path, target.run, done=True)
        raise
    except BaseException:
        # A task of a job that failed may write for a moment yet: the mark stays, for the next run.
        _sweep(path, target.run, done=False)
        raise
    _sweep(path, target.run, done=True)


def is_swept(path: str) -> bool:
    """Say whether no run left its mark in the table's log."""
    return not _marks(path)


def _marks(path: str) -> list[str]:
    """Return the names of the marks in the table's log."""
    filesystem, root = fsspec.core.url_to_fs(path)
    names = (found.rsplit("/", 1)[-1] for found in filesystem.ls(f"{root}/_delta_log", detail=False))
    return [name for name in names if name.startswith(MARK)]


def sweep_killed_runs(path: str) -> None:
    """Remove what killed runs left of a table whose rows are all as they must be: their driver died, their JVM went on.

    The caller has the table to itself.
    """
    if local_path(path) is not None:
        _sweep(path, None, done=True)


def _sweep(path: str, own: str | None, *, done: bool) -> None:
    """Remove the parts that no commit names, of this run and, on a local disk, of others; where done, their marks."""
    filesystem, root = fsspec.core.url_to_fs(path)
    for mark in _marks(path):
        version, run = mark.removeprefix(MARK).rsplit("-", 1)
        if run != own and local_path(path) is None:
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
            filesystem.rm(f"{root}/_delta_log/{mark}")
    if done and local_path(path) is not None:
        delta.clear_uncommitted(path)  # of a store it would take what another run is about to commit


@dataclass(frozen=True)
class Chosen:
    """Parts to commit, and how many rows each has.

    Attributes:
        new: Those with images alone that the table does not have.
        moved: Those that hold an image, too, that the table has under another label or split.
    """

    new: dict[str, int]
    moved: dict[str, int]


def choose_parts(spark: SparkSession, compared: Comparison, target: PartTarget) -> Chosen:
    """Return the parts with exactly the images to insert.

    Parts that hold others too (a duplicate in another part, a conflict, an image that is in the table) are written
    again without them, and so are parts with images that were dealt another split than the worker could know.
    """
    found, dealt, moving = compared.parts(), compared.dealt_otherwise(), compared.parts_with_moved()
    done = [(part, rows, part) for part, rows, keep in found if keep is None and part not in dealt]
    whole = {part for part, _, _ in done}
    mixed = [(part, keep, *dealt.get(part, ([], []))) for part, _, keep in found if part not in whole]
    if mixed:
        again = pa.Table.from_pylist([dict(zip(REWRITE_ARROW.names, row, strict=True)) for row in mixed], REWRITE_ARROW)
        rewritten = map_files(spark, target.folder, again, make_rewriter(target), REWRITTEN)
        done += [(row["part"], row["rows"], row["was"]) for row in rewritten]
    chosen = Chosen({}, {})
    for part, rows, was in done:
        (chosen.moved if was in moving else chosen.new)[part] = rows
    return chosen
