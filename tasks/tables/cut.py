"""Removal of rows from a table by copy-on-write: only the files that contain them are rewritten.

A MERGE sends every row through the JVM and a shuffle. A run with one deleted file took nine times as long as without.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from tasks.object_store import file_system
from tasks.schema import FILES_ARROW, IMAGES_ARROW
from tasks.tables.parts import WRITER_OPTIONS, PartTarget, PartWriter
from tasks.tables.rewriting import Mapper, map_files

CHANGE_FOLDER = "_change_data"
"""Folder of the files of the change data feed (PROTOCOL.md of Delta, "Change Data Files")."""

CHANGES_ARROW = IMAGES_ARROW.append(pa.field("_change_type", pa.string()))

CUT = "name string, added string, rows long, changes string"
"""Result of a task for one file.

name: The file. added, rows: The file that replaces it and its number of rows; `added` is null if no row is left, or if
all rows are new. changes: The file for the change data feed, null if no row changed.
"""


@dataclass
class Cut:
    """Rewritten files, as a commit needs them.

    Attributes:
        removed: Names of the files that are removed from the table.
        added: Names of the files that replace them, with their numbers of rows.
        changes: Names of the files for the change data feed, relative to the table's folder.
    """

    removed: list[str] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


def cut_images(
    spark: SparkSession,
    target: PartTarget,
    files: Iterable[str],
    parts: Iterable[str],
    deleted: pa.Table,
    moved: pa.Table,
) -> Cut:
    """Rewrite files of `images` without some rows, and write files for the change data feed.

    If a commit has files for the feed, readers take all its changes from them: so they contain the new rows, too.

    Args:
        spark: The session.
        target: Target of the written files.
        files: Names of the files with rows to delete.
        parts: Names of the files with new rows, some of which replace deleted rows.
        deleted: sha256 of the rows to delete.
        moved: sha256 of rows that are deleted and inserted under another label or split, which the feed calls updates.
    """
    filesystem, root = file_system(target.folder)
    filesystem.makedirs(f"{root}/{CHANGE_FOLDER}", exist_ok=True)
    named = [(name, False) for name in files] + [(name, True) for name in parts]
    rows = pa.table([*map(pa.array, zip(*named, strict=True))], ["name", "is_new"])
    contents = [table["sha256"].combine_chunks() for table in (deleted, moved)]
    cut = Cut()
    for done in map_files(spark, target.folder, rows, make_cutter(target, *contents), CUT):
        if done["changes"] is not None:
            cut.changes.append(done["changes"])
        if done["added"] is not None:
            cut.added[done["added"]] = done["rows"]
    cut.removed = [name for name, is_new in named if not is_new]
    return cut


def make_cutter(target: PartTarget, deleted: pa.Array, moved: pa.Array) -> Mapper:
    """Return the function for `mapInArrow` that maps rows of name and is_new (all rows are new) to rows of CUT."""

    def cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            done = [_cut(target, row["name"], deleted, moved, is_new=row["is_new"]) for row in batch.to_pylist()]
            kinds = {"name": pa.string(), "added": pa.string(), "rows": pa.int64(), "changes": pa.string()}
            yield pa.RecordBatch.from_pylist(done, schema=pa.schema(kinds.items()))

    return cut


def _cut(target: PartTarget, name: str, deleted: pa.Array, moved: pa.Array, *, is_new: bool) -> dict[str, Any]:
    filesystem, root = file_system(target.folder)
    changes = f"{CHANGE_FOLDER}/{target.new_name().replace('part-', 'cdc-', 1)}"
    kinds = ("update_postimage", "insert") if is_new else ("update_preimage", "delete")
    num_kept = num_changed = 0
    with (
        filesystem.open(f"{root}/{name}", "rb") as file,
        PartWriter(target) as writer,
        filesystem.open(f"{root}/{changes}", "wb") as feed,
        pq.ParquetWriter(feed, CHANGES_ARROW, **WRITER_OPTIONS) as change_writer,
    ):
        for rows in _row_groups(file, IMAGES_ARROW):
            is_changed = pa.array([True] * rows.num_rows) if is_new else pc.is_in(rows["sha256"], deleted)
            changed = rows.filter(is_changed)
            kind = pc.if_else(pc.is_in(changed["sha256"], moved), *kinds)
            change_writer.write_table(changed.append_column(CHANGES_ARROW.field("_change_type"), kind))
            kept = rows.filter(pc.invert(is_changed))
            for batch in kept.combine_chunks().to_batches():
                writer.write(batch)
            num_kept, num_changed = num_kept + kept.num_rows, num_changed + changed.num_rows
        added = writer.name or None
    return {"name": name, "added": added, "rows": num_kept, "changes": changes if num_changed else None}


def _row_groups(file: Any, schema: pa.Schema) -> Iterator[pa.Table]:
    # Spark writes timestamps as INT96, the older of Parquet's two types.
    parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit="us")
    for group in range(parquet.num_row_groups):
        rows = parquet.read_row_group(group, columns=schema.names)
        for name in set(schema.names) - set(rows.column_names):  # added to the table since
            rows = rows.append_column(schema.field(name), pa.nulls(rows.num_rows, schema.field(name).type))
        yield rows.select(schema.names).cast(schema)


def cut_ledger(target: PartTarget, files: list[str], changes: pa.Table) -> Cut:
    """Rewrite files of the ledger as a single file, with these rows in place of those with the same path.

    Args:
        target: Target of the written file.
        files: Names of the files with rows of these paths.
        changes: New and changed rows, with the columns of FILES_ARROW.
    """
    filesystem, root = file_system(target.folder)
    name, num_rows = target.new_name(), changes.num_rows
    paths = changes["path"].combine_chunks()
    with (
        filesystem.open(f"{root}/{name}", "wb") as opened,
        pq.ParquetWriter(opened, FILES_ARROW, compression="zstd") as writer,
    ):
        for old in files:
            with filesystem.open(f"{root}/{old}", "rb") as file:
                for rows in _row_groups(file, FILES_ARROW):
                    kept = rows.filter(pc.invert(pc.is_in(rows["path"], paths)))
                    writer.write_table(kept)
                    num_rows += kept.num_rows
        writer.write_table(changes)
    return Cut(removed=files, added={name: num_rows})
