"""Take rows out of a table by writing again only the files that hold them.

A MERGE does the same with every row on its way through the JVM and a shuffle, which made a run with one deleted file
nine times as long as one without.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from tasks.schema import FILES_ARROW, IMAGES_ARROW
from tasks.tables.parts import WRITER_OPTIONS, PartTarget, PartWriter
from tasks.tables.rewriting import Mapper, map_files

CHANGE_FOLDER = "_change_data"
"""Where the files of the change data feed lie (PROTOCOL.md of Delta, "Change Data Files")."""

CHANGES_ARROW = IMAGES_ARROW.append(pa.field("_change_type", pa.string()))

CUT = "name string, added string, rows long, changes string"
"""What a task says of a file: its name; the file without the rows and how many it has, null where none is left or
nothing was cut; the file with what changed, null where nothing did."""


@dataclass
class Cut:
    """What a commit has to say of files that were written again.

    Attributes:
        removed: Names of the files that leave the table.
        added: Names of those that take their place, and how many rows each has.
        changes: Names of the files for the change data feed, below the table's folder.
    """

    removed: list[str] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


def cut_images(
    spark: SparkSession, target: PartTarget, files: Iterable[str], parts: Iterable[str], gone: pa.Table, moved: pa.Table
) -> Cut:
    """Write files of `images` again without some rows, and what the change data feed says of these and of new rows.

    A commit with any file for the feed says everything by such files: so the new rows are there, too.

    Args:
        spark: The session.
        target: Where to write.
        files: Names of the files with rows that go.
        parts: Names of the files with rows that are new, some of which take the place of rows that go.
        gone: sha256 of the rows that go.
        moved: sha256 of those that are also new, under another label or split: they are updated.
    """
    filesystem, root = fsspec.core.url_to_fs(target.folder)
    filesystem.makedirs(f"{root}/{CHANGE_FOLDER}", exist_ok=True)
    named = [(name, False) for name in files] + [(name, True) for name in parts]
    rows = pa.table([*map(pa.array, zip(*named, strict=True))], ["name", "is_new"])
    contents = [table["sha256"].combine_chunks() for table in (gone, moved)]
    cut = Cut()
    for done in map_files(spark, target.folder, rows, make_cutter(target, *contents), CUT):
        if done["changes"] is not None:
            cut.changes.append(done["changes"])
        if done["added"] is not None:
            cut.added[done["added"]] = done["rows"]
    cut.removed = [name for name, is_new in named if not is_new]
    return cut


def make_cutter(target: PartTarget, gone: pa.Array, moved: pa.Array) -> Mapper:
    """Return the function for `mapInArrow`: rows of name and is_new (all of the file's rows are new) in, of CUT out."""

    def cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            done = [_cut(target, row["name"], gone, moved, is_new=row["is_new"]) for row in batch.to_pylist()]
            kinds = {"name": pa.string(), "added": pa.string(), "rows": pa.int64(), "changes": pa.string()}
            yield pa.RecordBatch.from_pylist(done, schema=pa.schema(kinds.items()))

    return cut


def _cut(target: PartTarget, name: str, gone: pa.Array, moved: pa.Array, *, is_new: bool) -> dict[str, Any]:
    filesystem, root = fsspec.core.url_to_fs(target.folder)
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
            goes = pa.array([True] * rows.num_rows) if is_new else pc.is_in(rows["sha256"], gone)
            changed = rows.filter(goes)
            kind = pc.if_else(pc.is_in(changed["sha256"], moved), *kinds)
            change_writer.write_table(changed.append_column(CHANGES_ARROW.field("_change_type"), kind))
            kept = rows.filter(pc.invert(goes))
            for batch in kept.combine_chunks().to_batches():
                writer.write(batch)
            num_kept, num_changed = num_kept + kept.num_rows, num_changed + changed.num_rows
        added = writer.name or None
    return {"name": name, "added": added, "rows": num_kept, "changes": changes if num_changed else None}


def _row_groups(file: Any, schema: pa.Schema) -> Iterator[pa.Table]:
    # Times are in the older of Parquet's two types in what Spark writes.
    parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit="us")
    for group in range(parquet.num_row_groups):
        yield parquet.read_row_group(group, columns=schema.names).select(schema.names).cast(schema)


def cut_ledger(target: PartTarget, files: list[str], changes: pa.Table) -> Cut:
    """Write files of the ledger again, as one, with these rows in the place of those of the same path.

    Args:
        target: Where to write.
        files: Names of the files with rows of these paths.
        changes: Columns of FILES_ARROW; the new rows, and those that are others now.
    """
    filesystem, root = fsspec.core.url_to_fs(target.folder)
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
