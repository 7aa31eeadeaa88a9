"""The content of a table version: digests of its rows that identify the bytes of the images without reading them."""

import hashlib
import json
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.cache.manifest import FORMAT, CacheManifest
from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.refs import TableRef
from tasks.schema import SPLITS
from tasks.tables import snapshots
from tasks.tables.delta import last_change
from tasks.tables.properties import STORED_SIDE_PROPERTY

DIGEST_PARTS = 4
"""Integers of 60 bits in the digest of a group of rows."""


@dataclass(frozen=True)
class Content:
    """Contents of a Delta version: digests of its rows, the classes, the rows per split.

    Attributes:
        digest: Digest of all rows' sha256 (of the original files), label and split.
        stored_digest: Digest of all rows' stored bytes, label and split.
        classes: Sorted labels.
        rows: Number of rows by split.
    """

    digest: str
    stored_digest: str
    classes: tuple[str, ...]
    rows: dict[str, int]


def stored_side_of(spark: SparkSession, table: TableRef) -> int | None:
    """Return the longest side of images that the table stores unchanged, in pixels; None if it does not record one.

    A table has one value for ever: the flow etl refuses another.
    """
    snapshot = snapshots.newest_snapshot(spark, table.path)
    side = "" if snapshot is None else snapshot.properties.get(STORED_SIDE_PROPERTY, "")
    return int(side) if side.isdecimal() else None


def read_content(images: DataFrame, table: TableRef, stored_side: int | None) -> Content:
    """Return the contents of a version, with digests independent of the order of rows and the layout of files.

    A digest is the exclusive or of the rows' SHA-256 (240 bits of it), per split and label: rows are distinct by
    key, so that no row can cancel another. No content is read: `_stored_bytes` identifies the bytes by other columns.

    Args:
        images: Rows of the version.
        table: The version.
        stored_side: As `stored_side_of`.
    """
    digests = {
        "original": F.concat_ws("|", "sha256", "label", "split"),
        "stored": F.concat_ws("|", _stored_bytes(images.columns, table, stored_side), "label", "split"),
    }
    parts = [
        F.bit_xor(F.conv(F.substring(F.sha2(text, 256), 1 + 15 * part, 15), 16, 10).cast("long")).alias(f"{name}{part}")
        for name, text in digests.items()
        for part in range(DIGEST_PARTS)
    ]
    groups = images.groupBy("split", "label").agg(F.count("*").alias("rows"), *parts).collect()

    def digest(name: str) -> str:
        columns = ["split", "label", "rows", *(f"{name}{part}" for part in range(DIGEST_PARTS))]
        summary = sorted([row[column] for column in columns] for row in groups)
        return hashlib.sha256(json.dumps(summary).encode()).hexdigest()

    return Content(
        digest=digest("original"),
        stored_digest=digest("stored"),
        classes=tuple(sorted({row["label"] for row in groups})),
        rows={split: sum(row["rows"] for row in groups if row["split"] == split) for split in SPLITS},
    )


def _stored_bytes(columns: list[str], table: TableRef, stored_side: int | None) -> Column:
    """Return text that identifies the stored bytes of a row.

    Bytes of an image that is not scaled down are those of the file, so sha256 is their digest. Those of others depend
    on the encoder of the run that ingested them, and never change in their table: table, image and time of ingestion
    identify them. A table that does not record what it scales has only the version at which its rows last changed.
    """
    if stored_side is None or not {"width", "height", "ingested_at"} <= set(columns):
        changed = last_change(table.path, table.version)
        return F.concat_ws("|", "sha256", F.lit(table.table_id or table.path), F.lit(str(changed)))
    scaled = F.concat_ws("|", "sha256", F.lit(table.table_id or table.path), F.unix_micros("ingested_at"))
    return F.when(F.greatest("width", "height") <= stored_side, F.col("sha256")).otherwise(scaled)


def has_content(cache: CacheManifest, content: Content, table: TableRef) -> bool:
    """Return whether a cache has the content of a table version.

    Caches of older releases do not record the stored bytes. Such a cache has them if it was built from the same images
    of the same table, since a table has one `stored_side`.
    """
    if cache.stored_digest:
        return cache.stored_digest == content.stored_digest
    is_same_table = bool(table.table_id) and cache.table.table_id == table.table_id
    return is_same_table and cache.content_digest == content.digest


def check_content(content: Content, table: TableRef) -> None:
    """Check that a classifier can be trained on the table.

    Raises:
        WrongInput: There are fewer than two classes, or a split is empty.
    """
    if len(content.classes) < 2:
        raise WrongInput(
            f"'{table.path}' version {table.version} has the classes {list(content.classes)}: "
            "a classifier needs at least two"
        )
    for split, rows in content.rows.items():
        if rows == 0:
            raise WrongInput(
                f"the split '{split}' of '{table.path}' version {table.version} has no images: add images (where "
                f"splits are predefined, to that one), or raise etl.{split}_fraction for a new table"
            )


def cache_key(content: Content, cache_config: CacheConfig) -> str:
    """Return the name of a cache: a hash of content and settings, not of the version, which OPTIMIZE changes too."""
    decisive = {"format": FORMAT, "stored": content.stored_digest, "settings": cache_config.decisive()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
