"""Parts of the table `images` that workers wrote and nobody committed yet: chosen, committed, or removed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import uuid4

import fsspec
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from tasks.errors import WrongInput
from tasks.etl import delta
from tasks.etl.outcomes import PICTURE
from tasks.etl.parts import PartTarget, make_rewriter
from tasks.storage import local_path

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


def sweep_killed_runs(path: str) -> None:
    """Remove what killed runs left of a table whose rows are all as they must be: their driver died, their JVM went on.

    The caller has the table to itself.
    """
    if local_path(path) is not None:
        _sweep(path, None, done=True)


def _sweep(path: str, own: str | None, *, done: bool) -> None:
    """Remove the parts that no commit names, of this run and, on a local disk, of others; where done, their marks."""
    filesystem, root = fsspec.core.url_to_fs(path)
    for mark in filesystem.ls(f"{root}/_delta_log", detail=False):
        name = mark.rsplit("/", 1)[-1]
        if not name.startswith(MARK):
            continue
        version, run = name.removeprefix(MARK).rsplit("-", 1)
        if run != own and local_path(path) is None:
            continue
        committed = delta.added_since(path, None if version == "-1" else int(version))
        for found in filesystem.ls(root, detail=False):
            name = found.rsplit("/", 1)[-1]
            if f"-{run}-" in name and name not in committed:
                filesystem.rm(found)
        if done:
            filesystem.rm(mark)
    if done and local_path(path) is not None:
        delta.clear_uncommitted(path)  # of a store it would take what another run is about to commit


def choose_parts(read: DataFrame, insert: DataFrame, target: PartTarget) -> dict[str, int]:
    """Return the names of the parts with exactly the pictures to insert, and how many rows each has.

    Parts that hold others too (a duplicate in another part, a conflict, a picture that is in the table) are written
    again without them.

    Args:
        read: sha256, label, split and part of the files that were read; part is null where there is no picture.
        insert: sha256, label and split of the pictures to insert.
        target: Where the parts lie.
    """
    read = read.where(F.col("part").isNotNull())
    parts = {row["part"]: row["count"] for row in read.groupBy("part").count().collect()}
    if sum(parts.values()) == insert.count():
        return parts  # Every picture that is to be inserted was read, so every file that was read is one of them.
    held = read.select(*PICTURE, "part").distinct()
    first = F.row_number().over(Window.partitionBy(*PICTURE).orderBy("part")) == 1
    marked = held.join(insert.withColumn("wanted", F.lit(True)), on=PICTURE, how="left").withColumn(
        "keep", F.coalesce("wanted", F.lit(False)) & first
    )
    counts = marked.groupBy("part").agg(F.count("*").alias("rows"), F.count_if("keep").alias("kept"))
    rows = counts.where(F.col("kept") > 0).collect()
    chosen = {row["part"]: row["rows"] for row in rows if row["kept"] == row["rows"]}
    num_mixed = len(rows) - len(chosen)
    if num_mixed:
        mixed = counts.where((F.col("kept") > 0) & (F.col("kept") < F.col("rows"))).select("part")
        kept = marked.where("keep").join(mixed, on="part", how="left_semi")
        kept = kept.groupBy("part").agg(F.collect_list("sha256").alias("keep")).repartition(num_mixed)
        rewritten = kept.mapInArrow(make_rewriter(target), "part string, rows long").collect()  # type: ignore[arg-type]
        chosen |= {row["part"]: row["rows"] for row in rewritten}
    return chosen
