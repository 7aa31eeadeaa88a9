"""Small versions of a few images for display, and the reading of their contents."""

import base64
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import dataset, field
from pyarrow.parquet import ParquetFile
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.etl.extract import read_whole
from tasks.etl.source import read_remote
from tasks.model_package.decode import decode_image, encode_jpeg, fit_within
from tasks.model_package.reasons import BadImage
from tasks.refs import TableRef
from tasks.schema import IMAGES_ARROW, columns_of
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables import snapshots

logger = logging.getLogger("lakevision.predict")

SIDE = 96
"""Longest side of a thumbnail, in pixels: twenty of them have about 100 kB, and an artifact is a row of a database."""

QUALITY = 80

BATCH, BUFFER_BYTES = 64, 1 << 20
"""Rows and bytes that are read from a file at once, since a column of contents may have a gigabyte."""

CONTENT_ARROW = columns_of(IMAGES_ARROW, "sha256", "content")


def thumbnail(content: bytes | None, side: int = SIDE) -> str:
    """Return a small JPEG of an image as a data URI; an empty text without content or for a broken image."""
    if content is None:
        return ""
    try:
        image = decode_image(content, box=side)
    except BadImage:  # The source may have changed since it was predicted.
        return ""
    jpeg = encode_jpeg(fit_within(image, side), QUALITY, "4:2:0")
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def contents_in_table(
    spark: SparkSession | None, table: TableRef, storage: Storage, rows: list[dict[str, Any]]
) -> dict[str, bytes]:
    """Return the contents of a few images of a table, by sha256; only files with one of them are read, in small parts.

    Args:
        spark: The session, or None.
        table: The table version.
        storage: Storage with the home, for temporary files.
        rows: The images, with sha256.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
    """
    wanted = pa.array([row["sha256"] for row in rows])
    try:
        files = snapshots.version_rows(None, table, CONTENT_ARROW, scratch_root(storage)).files
    except NeedsSpark:
        return _read_by_spark(spark, table, wanted)
    if not files:
        return {}
    found: dict[str, bytes] = {}
    holders = dataset(list(files)).to_table(columns=["__filename"], filter=field("sha256").isin(wanted))
    for file in holders["__filename"].unique().to_pylist():
        with ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as parquet:
            for group in range(parquet.num_row_groups):
                keys = parquet.read_row_group(group, ["sha256"])["sha256"]
                if pc.any(pc.is_in(keys, wanted)).as_py():
                    for batch in parquet.iter_batches(BATCH, [group], CONTENT_ARROW.names):
                        images = batch.filter(pc.is_in(batch["sha256"], wanted))
                        found |= dict(zip(images["sha256"].to_pylist(), images["content"].to_pylist(), strict=True))
    return found


def _read_by_spark(spark: SparkSession | None, table: TableRef, wanted: pa.Array) -> dict[str, bytes]:
    is_wanted = F.col("sha256").isin(wanted.to_pylist())
    having = snapshots.read_version(spark, table).where(is_wanted).select("_metadata.file_path").distinct()
    files = [unquote(row["file_path"]) for row in having.collect()]
    if spark is None or not files:
        return {}
    # The files and not the table, all of whose contents Spark would read.
    images = spark.read.parquet(*files)
    if not set(CONTENT_ARROW.names) <= set(images.columns):  # a table that maps its columns to other names
        return {}
    found = images.where(is_wanted).select(*CONTENT_ARROW.names).collect()
    return {row["sha256"]: bytes(row["content"]) for row in found}


def contents_in_source(
    spark: SparkSession | None, location: Path | str, inputs: TableRef, rows: list[dict[str, Any]]
) -> dict[str, bytes]:
    """Return the contents of a few files of a source, by sha256; those that cannot be read now have none.

    Args:
        spark: The session, or None for none, with which the files of a URL have no content.
        location: The source.
        inputs: The table `inputs`.
        rows: The files, with path and sha256.
    """
    found: dict[str, bytes] = {}
    if isinstance(location, Path):
        for row in rows:
            try:
                found[row["sha256"]] = read_whole(location / row["path"], os.path.realpath(location))
            except OSError as error:
                logger.debug("no thumbnail of '%s': %s", row["path"], error)
    elif spark is not None:
        listed = snapshots.read_version(spark, inputs).where(F.col("source") == location)
        files = listed.where(F.col("path").isin([row["path"] for row in rows])).select("path", "size", "sha256")
        read = read_remote(spark, files, location)
        found |= {row["sha256"]: bytes(row["content"]) for row in read.where("content IS NOT NULL").collect()}
    return found
