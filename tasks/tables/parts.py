"""Parquet files of the table `images`, written directly by Spark's Python workers.

Images do not pass through the JVM. It would copy them as an Arrow batch, a row, a cached block and a Parquet page,
which takes more CPU time than decoding.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext

from tasks.object_store import file_system
from tasks.schema import IMAGES, IMAGES_ARROW

Mapper = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function for `mapInArrow`."""

ROW_GROUP_BYTES = 16 << 20
"""Bytes of content per row group, exceeded by at most one image: the memory of a worker, and of a reader."""

PART_BYTES = 128 << 20
"""Bytes of content per file, exceeded by at most one row group."""

WRITER_OPTIONS: dict[str, Any] = {
    # JPEG bytes do not compress, have no repeated values, and no use for minimum and maximum.
    "compression": {name: "NONE" if name == "content" else "ZSTD" for name in IMAGES.names},
    "use_dictionary": ["label", "split"],
    "write_statistics": [name for name in IMAGES.names if name != "content"],
}


@dataclass(frozen=True)
class PartTarget:
    """Target of the parts of one run.

    Attributes:
        folder: Path or URL of the table.
        run: Hexadecimal id; part of the name of every part, so that uncommitted parts of the run can be found.
        ingested_at: Value of the column `ingested_at` for every image of the run.
    """

    folder: str
    run: str
    ingested_at: datetime

    def new_name(self) -> str:
        """Return a unique name for a part, also if a task is retried."""
        task = TaskContext.get()
        return f"part-{0 if task is None else task.partitionId():05d}-{self.run}-{uuid4().hex[:12]}.parquet"


class PartWriter:
    """Writer of one task's images; an image with the same label and split is written once per file."""

    def __init__(self, target: PartTarget) -> None:
        self._target = target
        self.name = ""
        """Name of the open file, empty if no file is open."""
        self._writer: pq.ParquetWriter | None = None
        self._opened = ExitStack()
        """The open file, and its writer, which is closed before it."""
        self._written: set[tuple[str, str, str]] = set()
        self._part_bytes = 0
        self._rows: list[dict[str, Any]] = []
        self._row_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        # The buffer of a failed task is dropped, since writing it could fail again; its parts are removed later.
        self._close(flush=kind is None)

    def add(self, image: dict[str, Any]) -> str:
        """Add a row of `images` without `ingested_at`; return the name of the file that it is written to."""
        if self._part_bytes >= PART_BYTES:
            self._close()
        if not self.name:
            self.name = self._target.new_name()
        key = (image["sha256"], image["label"], image["split"])
        if key not in self._written:
            self._written.add(key)
            self._rows.append(image | {"ingested_at": self._target.ingested_at})
            self._row_bytes += len(image["content"])
            if self._row_bytes >= ROW_GROUP_BYTES:
                self._flush()
        return self.name

    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows of `images` unchanged, as a row group of the open file."""
        if self._writer is None:
            self.name = self.name or self._target.new_name()
            filesystem, root = file_system(self._target.folder)
            file = self._opened.enter_context(filesystem.open(f"{root}/{self.name}", "wb"))
            self._writer = self._opened.enter_context(pq.ParquetWriter(file, IMAGES_ARROW, **WRITER_OPTIONS))
        self._writer.write_batch(rows)

    def _flush(self) -> None:
        if self._rows:
            self.write(pa.RecordBatch.from_pylist(self._rows, schema=IMAGES_ARROW))
        self._part_bytes += self._row_bytes
        self._rows, self._row_bytes = [], 0

    def _close(self, *, flush: bool = True) -> None:
        with self._opened:
            if flush:
                self._flush()
        self.name, self._writer = "", None
        self._written, self._part_bytes = set(), 0


def write_rows(batches: Iterator[pa.RecordBatch], target: PartTarget, schema: pa.Schema) -> str:
    """Write rows to one file of `target`; return its name, which is empty without batches."""
    filesystem, root = file_system(target.folder)
    name = ""
    with ExitStack() as opened:
        for rows in batches:
            if not name:
                name = target.new_name()
                file = opened.enter_context(filesystem.open(f"{root}/{name}", "wb"))
                writer = opened.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))
            writer.write_batch(rows)
    return name


def make_row_writer(mapper: Mapper, target: PartTarget, schema: pa.Schema) -> Mapper:
    """Return a function for `mapInArrow` that writes the rows of `mapper` to one file of `target` per task.

    It yields the name of the file in the column name. The rows would otherwise be collected in the driver's JVM.
    """

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if name := write_rows(mapper(batches), target, schema):
            yield pa.RecordBatch.from_pydict({"name": [name]})

    return write


def read_rows(target: PartTarget, names: Iterable[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of these files of `target`, which no commit names and which are removed with its other files."""
    filesystem, root = file_system(target.folder)
    for name in names:
        with filesystem.open(f"{root}/{name}", "rb") as file:
            for rows in pq.ParquetFile(file).iter_batches():
                yield from pa.Table.from_batches([rows]).cast(schema).to_batches()


REWRITE_ARROW = pa.schema({"part": pa.string(), "contents": pa.list_(pa.string()), "splits": pa.list_(pa.string())})
"""A part to rewrite.

contents, splits: sha256 and new split of the rows that change; null for rows that are removed.
"""


REWRITTEN = "part string, rows long, was string"
"""A rewritten part: its new name, its number of rows, and its old name."""


def make_rewriter(target: PartTarget) -> Mapper:
    """Return the function for `mapInArrow` that rewrites parts with fewer rows or other splits.

    It maps rows of REWRITE_ARROW to rows of REWRITTEN.
    """

    def rewrite(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pylist([_rewrite(target, **row) for row in batch.to_pylist()])

    return rewrite


def _rewrite(target: PartTarget, part: str, contents: list[str], splits: list[str | None]) -> dict[str, Any]:
    changed, new_splits = pa.array(contents, pa.string()), pa.array(splits, pa.string())
    removed = changed.filter(new_splits.is_null())
    filesystem, root = file_system(target.folder)
    num_rows = 0
    with filesystem.open(f"{root}/{part}", "rb") as file, PartWriter(target) as writer:
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            rows = parquet.read_row_group(group).cast(IMAGES_ARROW)
            rows = rows.filter(pc.invert(pc.is_in(rows["sha256"], removed)))
            split = pc.coalesce(new_splits.take(pc.index_in(rows["sha256"], changed).combine_chunks()), rows["split"])
            rows = rows.set_column(IMAGES_ARROW.get_field_index("split"), IMAGES_ARROW.field("split"), split)
            for batch in rows.combine_chunks().to_batches():
                writer.write(batch)
            num_rows += rows.num_rows
        return {"part": writer.name, "rows": num_rows, "was": part}
