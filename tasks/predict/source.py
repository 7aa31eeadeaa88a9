"""A folder or URL of images that is predicted without a table: its listing, and its files as rows with content."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from tasks.config.etl import BUILTIN_DIGITS
from tasks.config.storage import SparkConfig
from tasks.etl.choice import LeftOut, ListedFiles
from tasks.etl.extract import VANISHED, read_whole
from tasks.etl.listing import check_not_empty, local_files
from tasks.etl.own_folders import OwnFolders
from tasks.etl.source import find_source, read_remote, remote_files, write_digits
from tasks.model_package.reasons import Reason
from tasks.paths import GONE
from tasks.schema import FILE_ARROW, TO_PREDICT_ARROW
from tasks.spark.cluster import check_file_visible, num_task_slots
from tasks.spark.scratch import scratch_root
from tasks.spark.session import spark_session
from tasks.spark.worker_log import num_tasks
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables.delta import newest_commit
from tasks.tables.parquet_rows import SpooledRows, spool_rows
from tasks.tables.parts import Mapper

SETTING = "predict.source"

BATCH_BYTES = 32 << 20
"""Size from which on a task passes the contents that it has read to inference: 128 photos may have a gigabyte."""

READ_ARROW = pa.schema([*TO_PREDICT_ARROW, ("sha256", pa.string()), ("error", pa.string()), ("content", pa.binary())])
"""Columns of a file that was read. If it cannot be read, error is the reason, and sha256 and content are null.

Nor has a file content that has a prediction: its sha256 is known_sha256.
"""

READ = from_arrow_schema(READ_ARROW)


@dataclass(frozen=True)
class ListedSource:
    """A source and its listing.

    Attributes:
        location: A folder, or the URL of one as text.
        listing: Its image files (FILE_ARROW).
        before: The newest commit of the table `inputs` before the listing; after a newer one it may be outdated.
        left: Files that the listing leaves out.
    """

    location: Path | str
    listing: SpooledRows | pa.Table
    before: str | None
    left: LeftOut = field(default_factory=LeftOut)

    @property
    def name(self) -> str:
        """Absolute path or URL, as in the table `inputs`."""
        return str(self.location)


def list_source(
    source: str,
    inputs: str,
    storage: Storage,
    config: SparkConfig,
    *,
    may_be_empty: bool = False,
    own: OwnFolders | None = None,
) -> ListedSource:
    """List the image files of a source in any layout; write the built-in digits first if they are the source.

    A URL is listed by Spark's JVM, in the active session or a new one; a local folder is listed without Spark.

    Args:
        source: Folder or URL.
        inputs: Path or URL of the table `inputs`.
        storage: Location of temporary files.
        config: Settings of the Spark session.
        may_be_empty: Whether a source without image files is listed, too: its files may still come.
        own: Folders to leave out; None for those of `storage`.

    Raises:
        WrongInput: The source is neither a path nor a URL, does not exist, cannot be listed, or has no image files; or
            as `OwnFolders.of`.
        SourceUnavailable: As `local_files` and `remote_files`.
        DiskFull: The disk has no space for the listing.
    """
    location = find_source(source, storage, SETTING)
    if source == BUILTIN_DIGITS:
        write_digits(Path(location))
    own = own or OwnFolders.of(location, storage, SETTING)
    before, left = newest_commit(inputs), LeftOut(keeps_rows=False, decided=own.decided)
    with translate_disk_full(storage.home):
        if isinstance(location, Path):
            listing = _spool(local_files(location, "images", SETTING, own, left), storage)
        else:
            with spark_session(config, storage) as spark:
                listing = _spool(remote_files(spark, location, SETTING, own, left), storage)
    left.warn_of_links(str(location), own.said)
    if not may_be_empty:
        check_not_empty(listing, str(location), left, SETTING)
    return ListedSource(location, listing, before, left)


def _spool(files: Iterator[ListedFiles], storage: Storage) -> SpooledRows:
    batches = (pa.RecordBatch.from_arrays(found.columns(), schema=FILE_ARROW) for found in files)
    return spool_rows(batches, FILE_ARROW, scratch_root(storage))


def read_files(spark: SparkSession, files: pa.Table, location: Path | str) -> DataFrame:
    """Return the columns of READ_ARROW of these files, read when the frame is evaluated.

    A file that was removed since it was listed has no row.

    Args:
        spark: The session.
        files: Columns of TO_PREDICT_ARROW, at least one row.
        location: The source.

    Raises:
        WrongInput: The source is a folder, and an executor does not see it.
    """
    slots = num_task_slots(spark)
    tasks = min(files.num_rows, num_tasks(files.num_rows, slots, least=slots))
    listed = spark.createDataFrame(files).repartition(tasks)
    if isinstance(location, Path):
        check_file_visible(spark, str(location), files["path"][0].as_py(), SETTING)
        reader = make_file_reader(location)
        return listed.mapInArrow(reader, READ)
    read = read_remote(spark, listed, location)
    reason = F.concat(F.lit(f"{Reason.UNREADABLE.value}: "), "unreadable")
    found = read.where(~F.coalesce(F.col("unreadable").startswith(VANISHED), F.lit(False)))  # Spark's literal
    return found.select(
        *TO_PREDICT_ARROW.names, F.sha2("content", 256).alias("sha256"), reason.alias("error"), "content"
    )


def make_file_reader(source: Path) -> Mapper:
    """Return the function for `mapInArrow` that maps batches of TO_PREDICT_ARROW to batches of READ_ARROW."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        root = os.path.realpath(source)
        for batch in batches:
            rows: list[dict[str, Any]] = []
            num_bytes = 0
            for listed in batch.to_pylist():
                if (found := _read_file(source / listed["path"], root)) is not None:
                    if found["content"] is not None and found["sha256"] == listed["known_sha256"]:
                        found["content"] = None
                    rows.append(listed | found)
                    num_bytes += len(found["content"] or b"")
                if num_bytes >= BATCH_BYTES:
                    yield pa.RecordBatch.from_pylist(rows, READ_ARROW)
                    rows, num_bytes = [], 0
            if rows:
                yield pa.RecordBatch.from_pylist(rows, READ_ARROW)

    return read


def _read_file(file: Path, root: str) -> dict[str, Any] | None:
    """Return sha256 and content of a file, or the reason why it cannot be read; None if it was removed."""
    row: dict[str, Any] = dict.fromkeys(("sha256", "error", "content"))
    try:
        content = read_whole(file, root)
    except OSError as error:
        # The name of a file that is not valid UTF-8 is listed with its bytes escaped, and no file has that name.
        if error.errno in GONE and "\\x" not in str(file):
            return None
        return row | {"error": f"{Reason.UNREADABLE.value}: {error}"}
    return row | {"sha256": hashlib.sha256(content).hexdigest(), "content": content}
