"""The record of the files that a stream on a folder or URL has processed, in the folder of its checkpoint."""

import glob
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq

from tasks.config.prediction import StreamConfig
from tasks.object_store import file_system, list_names
from tasks.paths import local_path
from tasks.predict.inputs import FINGERPRINT
from tasks.schema import FILE_ARROW
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.stream.checkpoint import damaged
from tasks.tables.parquet_rows import ParquetRows, SpooledRows, spool_rows
from tasks.tables.relations import Relations

LISTED, BATCH = "listed.parquet", "batch-"
"""All files of the last listing whose batches have ended, and the begin of the names of the batches since then."""

PARTIAL = ".partial"
"""Local file that gets its name when it is written: a record is whole or does not exist, as an object of a store."""

LISTINGS = "listings"
"""Folder of an earlier release, with files that are in its LISTED but wait for a batch."""

NEW = """
FROM listing l ANTI JOIN (
    SELECT fingerprint(path, size, modified_at) AS one, fingerprint(path || '~', size, modified_at) AS two,
        status_of(changed_at, inode) AS status
    FROM processed
) k ON fingerprint(l.path, l.size, l.modified_at) = k.one AND fingerprint(l.path || '~', l.size, l.modified_at) = k.two
AND coalesce(status_of(l.changed_at, l.inode) = k.status, true) ORDER BY path
"""
"""Files with a path, size, time, inode or time of status change that the record does not have.

A record of an earlier release lacks the last two: its files count as unchanged.
"""


@dataclass(frozen=True)
class ProcessedFiles:
    """The record of a stream; only one driver at a time writes to it.

    A file is recorded after its batch. That of a run which is killed is new to the next run, which leaves it out if its
    prediction was committed.

    Attributes:
        checkpoint: Folder or URL of the checkpoint, which may not exist.
        storage: Storage with the home, to which queries spill.
    """

    checkpoint: str
    storage: Storage

    def new_files(self, listing: SpooledRows) -> SpooledRows:
        """Return the files (FILE_ARROW) that are new or changed since they were recorded; without a record, all.

        Args:
            listing: The source as it is now.

        Raises:
            WrongInput: The record is damaged.
        """
        processed = self._read()
        if processed is None:
            return listing
        with Relations(self.storage) as relations:
            relations.add("listing", listing)
            relations.add("processed", processed)
            relations.run(FINGERPRINT)
            return spool_rows(relations.batches(NEW, FILE_ARROW), FILE_ARROW, scratch_root(self.storage))

    def take_back_listings(self) -> None:
        """Make the files new again that an earlier release recorded with listings of them that wait for a batch.

        Raises:
            WrongInput: A listing or the record is damaged.
        """
        listings = f"{self.checkpoint}/{LISTINGS}"
        if not list_names(listings):
            return
        filesystem, root = file_system(listings)
        waiting: list[str] = []
        for name in filesystem.glob(f"{glob.escape(root)}/*.parquet"):
            try:
                with filesystem.open(name, "rb") as file:
                    waiting += pq.read_table(file, columns=["path"])["path"].to_pylist()
            except pa.ArrowInvalid:
                raise damaged(self.checkpoint, f"{LISTINGS}/{Path(name).name} cannot be read") from None
        recorded = self._read()
        if recorded is not None:
            rows = pyarrow.dataset.dataset(list(recorded.files), schema=FILE_ARROW)
            self._write(rows.to_batches(), waiting, LISTED)
        filesystem.rm(root, recursive=True)

    def add_batch(self, files: pa.Table, vanished: Sequence[str]) -> None:
        """Record the files of a batch (FILE_ARROW), but for those that vanished: they are new if they come back."""
        self._write(files.to_batches(), vanished, f"{BATCH}{time.time_ns()}.parquet")

    def replace(self, listing: SpooledRows, vanished: Sequence[str]) -> None:
        """Record all files of a listing whose batches have ended, as `add_batch`, in place of all others."""
        replaced = [name for name in list_names(self.checkpoint) if name.startswith(BATCH)]
        self._write(listing.batches(), vanished, LISTED)
        filesystem, root = file_system(self.checkpoint)
        for name in replaced:
            filesystem.rm_file(f"{root}/{name}")

    def _write(self, files: Iterable[pa.RecordBatch], vanished: Sequence[str], name: str) -> None:
        gone = pa.array(vanished, pa.string())
        kept = (rows.filter(pc.invert(pc.is_in(rows["path"], gone))) for rows in files)
        spooled = spool_rows(kept, FILE_ARROW, scratch_root(self.storage))
        filesystem, root = file_system(self.checkpoint)
        if local_path(self.checkpoint) is None:
            filesystem.put_file(spooled.files[0], f"{root}/{name}")
        else:
            filesystem.makedirs(root, exist_ok=True)
            filesystem.put_file(spooled.files[0], f"{root}/{PARTIAL}")
            filesystem.mv(f"{root}/{PARTIAL}", f"{root}/{name}")

    def _read(self) -> ParquetRows | None:
        names = [name for name in list_names(self.checkpoint) if name.endswith(".parquet")]
        if not names:
            return None
        filesystem, root = file_system(self.checkpoint)
        files = [f"{root}/{name}" for name in names]
        for name, path in zip(names, files, strict=True):
            try:
                with filesystem.open(path, "rb") as file:
                    pq.ParquetFile(file).close()
            except pa.ArrowInvalid:
                raise damaged(self.checkpoint, f"{name} cannot be read") from None
        if local_path(self.checkpoint) is not None:
            return ParquetRows(tuple(files), FILE_ARROW)
        # A record of an earlier release lacks columns, which are null then.
        rows = pyarrow.dataset.dataset(files, schema=FILE_ARROW, filesystem=filesystem)
        return spool_rows(rows.to_batches(), FILE_ARROW, scratch_root(self.storage))


def batches_of(files: pa.Table, stream: StreamConfig) -> Iterator[pa.Table]:
    """Yield the files of each batch: a batch is full with a number of files, or with the file that reaches a size."""
    begin, num_bytes, most = 0, 0, stream.max_megabytes_per_batch * 10**6
    for number, size in enumerate(files["size"].to_pylist(), start=1):
        num_bytes += size
        if num_bytes >= most or number - begin == stream.max_files_per_batch:
            yield files.slice(begin, number - begin)
            begin, num_bytes = number, 0
    if begin < files.num_rows:
        yield files.slice(begin)


def age_of_oldest(files: pa.Table, now: float) -> float:
    """Return the age of the file with the oldest change at a time, in seconds; 0 without files."""
    oldest = pc.min(files["modified_at"]).as_py()
    return max(0.0, now - oldest.timestamp()) if oldest else 0.0
