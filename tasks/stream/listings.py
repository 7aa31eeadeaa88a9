"""The files that are new to a stream, handed over to Structured Streaming as listings of one batch each.

Spark's own source cannot read a folder of images itself. It skips empty files, so that a file which is being copied is
lost, and names that begin with an underscore. It follows links out of the folder, does not see a replaced file, and
takes brackets in the folder's path for a pattern. So a source is listed as for batch inference, and compared with its
last listing.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from tasks.config.stream import StreamConfig
from tasks.object_store import file_system, list_names
from tasks.paths import local_path
from tasks.predict.source_pending import FINGERPRINT
from tasks.schema import FILE_ARROW
from tasks.spark.file_systems import prepare_store
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.stream.checkpoint import damaged
from tasks.stream.lag import Lag
from tasks.system.locks import excludes_other_machines
from tasks.tables.parquet_rows import ParquetRows, SpooledRows, spool_rows
from tasks.tables.relations import Relations

LISTINGS, LISTED = "listings", "listed.parquet"
"""In the folder of a checkpoint: the listings that wait for a batch, and all files up to the last that was handed over.

A file is first in a listing that waits, then in the list of all: a run that is killed in between hands it over again.
"""

KEPT_FOR_EVER = "36500d"
"""Spark's file source ignores files that are older than its newest one by more than this."""

NEW = """
SELECT path, size, modified_at, changed_at, inode FROM (
    SELECT *, fingerprint(path, size, modified_at) AS one, fingerprint(path || '~', size, modified_at) AS two
    FROM listing
) l LEFT JOIN (
    SELECT fingerprint(path, size, modified_at) AS one, fingerprint(path || '~', size, modified_at) AS two,
        status_of(changed_at, inode) AS status
    FROM listed
) k ON l.one = k.one AND l.two = k.two WHERE k.one IS NULL OR status_of(changed_at, inode) <> k.status
ORDER BY path
"""
"""Files with a path, size, time, inode or time of status change that the last listing does not have.

A listing of an earlier release lacks the last two: its files count as unchanged.
"""


def new_files(listing: SpooledRows, checkpoint: str, storage: Storage) -> SpooledRows | pa.Table:
    """Return the files (FILE_ARROW) that are new or changed since the last listing.

    Args:
        listing: The source as it is now.
        checkpoint: Folder or URL of the checkpoint; without a last listing in it, all files are new.
        storage: Storage with the home, to which queries spill.

    Raises:
        WrongInput: The last listing is damaged.
    """
    listed = _read_listed(checkpoint, storage)
    if listed is None:
        return listing
    with Relations(storage) as relations:
        relations.add("listing", listing)
        relations.add("listed", listed)
        relations.run(FINGERPRINT)
        return relations.table(NEW, FILE_ARROW)


def hand_over(files: pa.Table, listing: SpooledRows, checkpoint: str, stream: StreamConfig, storage: Storage) -> None:
    """Write the listings of the next batches, then the list of all files.

    Args:
        files: The files to predict (FILE_ARROW).
        listing: The source as it is now.
        checkpoint: Folder or URL of the checkpoint.
        stream: Settings with the bounds of a batch.
        storage: Storage with the home, for temporary files.
    """
    began = time.time_ns()
    for number, part in enumerate(batches_of(files, stream)):
        rows = spool_rows(part.to_batches(), FILE_ARROW, scratch_root(storage))
        _write(rows, f"{checkpoint}/{LISTINGS}", f"{began:020d}-{number:08d}.parquet")
    _write(listing, checkpoint, LISTED)


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


def read_listings(spark: SparkSession, checkpoint: str) -> DataFrame:
    """Return the listings of a checkpoint as a streaming frame with a batch for each."""
    prepare_store(spark, checkpoint)
    follow_checkpoint(checkpoint)
    rows = spark.readStream.schema(from_arrow_schema(FILE_ARROW)).option("maxFilesPerTrigger", 1)
    # Spark takes the path for a pattern.
    pattern = re.sub(r"([\[\]{}*?\\])", r"\\\1", f"{checkpoint}/{LISTINGS}")
    return rows.option("maxFileAge", KEPT_FOR_EVER).parquet(pattern)


def follow_checkpoint(checkpoint: str) -> None:
    """Replace the paths of listings that Spark has recorded in a local checkpoint which was moved or copied since then.

    Spark would read the listings of an unfinished batch at their former paths, and refuses listings of other folders.

    Raises:
        WrongInput: The checkpoint is damaged.
    """
    folder = local_path(checkpoint)
    for log in [] if folder is None else folder.glob("sources/*/*"):
        if log.name.removesuffix(".compact").isdecimal():
            try:
                recorded = log.read_text(encoding="utf-8")
                followed = "\n".join(_followed(recorded.splitlines(), f"{folder}/{LISTINGS}"))
            except (ValueError, LookupError, TypeError, AttributeError):
                raise damaged(checkpoint, f"{'/'.join(log.parts[-3:])} cannot be read") from None
            if followed != recorded:
                partial = log.with_name(f".{log.name}.partial")
                partial.write_text(followed, encoding="utf-8")
                log.with_name(f".{log.name}.crc").unlink(missing_ok=True)  # Hadoop's checksum, of the former content
                os.replace(partial, log)


def _followed(lines: list[str], folder: str) -> Iterator[str]:
    """Yield the lines of a log of Spark's file source, with listings in this folder: a version, then JSON objects."""
    yield lines[0]
    for line in lines[1:]:
        listing = json.loads(line)
        own = Path(folder, listing["path"].rpartition("/")[2])
        is_own = local_path(listing["path"]) == own
        yield line if is_own else json.dumps(listing | {"path": own.as_uri()}, separators=(",", ":"))


def waiting(checkpoint: str, now: float) -> Lag:
    """Return the number of files in listings that no batch has processed, and the age of the oldest at a time.

    Raises:
        WrongInput: A listing is damaged.
    """
    filesystem, root = file_system(f"{checkpoint}/{LISTINGS}")
    num, ages = 0, [0.0]
    for name in waiting_names(checkpoint):
        try:
            with filesystem.open(f"{root}/{name}", "rb") as file:
                part = pq.read_table(file, columns=["modified_at"])
        except pa.ArrowInvalid:
            raise damaged(checkpoint, f"{LISTINGS}/{name} cannot be read") from None
        num += part.num_rows
        ages.append(age_of_oldest(part, now))
    return Lag(0, max(ages), num)


def age_of_oldest(files: pa.Table, now: float) -> float:
    """Return the age of the file with the oldest change at a time, in seconds; 0 without files."""
    times = [found.timestamp() for found in files["modified_at"].unique().to_pylist()]
    return max(0.0, now - min(times)) if times else 0.0


def remove_processed(checkpoint: str, names: Sequence[str]) -> None:
    """Remove these listings of a checkpoint, which were processed: no later batch reads them."""
    filesystem, root = file_system(f"{checkpoint}/{LISTINGS}")
    for name in names:
        filesystem.rm_file(f"{root}/{name}")


def forget(paths: tuple[str, ...], checkpoint: str, storage: Storage) -> None:
    """Remove files from the list of all: they vanished before they were read, and are new if they come back."""
    listed = _read_listed(checkpoint, storage)
    assert listed is not None, checkpoint
    with Relations(storage) as relations:
        relations.add("listed", listed)
        relations.add("vanished", pa.table({"path": list(paths)}))
        rows = spool_rows(
            relations.batches("FROM listed ANTI JOIN vanished USING (path)", FILE_ARROW),
            FILE_ARROW,
            scratch_root(storage),
        )
    _write(rows, checkpoint, LISTED)


def waiting_names(checkpoint: str) -> list[str]:
    """Return the names of the listings of a checkpoint; a listing that is being written is not among them."""
    return sorted(name for name in list_names(f"{checkpoint}/{LISTINGS}") if not name.startswith("."))


def _write(rows: SpooledRows, folder: str, name: str) -> None:
    """Write a file as a whole or not at all."""
    filesystem, root = file_system(folder)
    if local_path(folder) is None:
        filesystem.put_file(rows.files[0], f"{root}/{name}")
        return
    Path(root).mkdir(parents=True, exist_ok=True)
    if excludes_other_machines(folder):
        for left in Path(root).glob(".*.partial"):  # By a killed driver: another one would have the lock.
            left.unlink()
    partial = Path(f"{root}/.{name}.partial")
    try:
        shutil.copyfile(rows.files[0], partial)
        os.replace(partial, f"{root}/{name}")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read_listed(checkpoint: str, storage: Storage) -> ParquetRows | None:
    """Return the list of all files, None if there is none yet.

    Raises:
        WrongInput: It is damaged.
    """
    if LISTED not in list_names(checkpoint):
        return None
    filesystem, root = file_system(checkpoint)
    try:
        with filesystem.open(f"{root}/{LISTED}", "rb") as file, pq.ParquetFile(file):
            if local_path(checkpoint) is not None:
                return ParquetRows((f"{root}/{LISTED}",), FILE_ARROW)
            # A list of an earlier release lacks columns, which are null then.
            rows = pyarrow.dataset.dataset(f"{root}/{LISTED}", schema=FILE_ARROW, filesystem=filesystem)
            return spool_rows(rows.to_batches(), FILE_ARROW, scratch_root(storage))
    except pa.ArrowInvalid:
        raise damaged(checkpoint, f"{LISTED} cannot be read") from None
