"""The build of a cache from a Delta version: decoded pixels in Parquet files of equal row groups."""

import hashlib
import json
import logging
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.cache.manifest import (
    FORMAT,
    CacheFile,
    CacheManifest,
    CacheSplit,
    find_cache,
    whole_cache,
    write_manifest,
)
from tasks.cache.plan import plan_files, with_files
from tasks.cache.read_lock import CacheReadLock
from tasks.cache.sizes import cache_bytes, check_disk, rows_per_file, rows_per_group
from tasks.cache.sweep import discard, remove_unnamed, sweep_caches
from tasks.cache.write import make_writer
from tasks.config.cache import CacheConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.object_store import file_system
from tasks.progress.count import counted
from tasks.refs import CacheRef, TableRef
from tasks.schema import CACHE_PART_ARROW, SPLITS
from tasks.spark.cluster import num_task_slots
from tasks.spark.progress import count_ended_tasks, num_tasks
from tasks.spark.session import spark_session
from tasks.spark.visible_folders import check_visible
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots

logger = logging.getLogger("lakevision.cache")


@dataclass(frozen=True)
class Content:
    """Contents of a Delta version: a digest of all rows' sha256, label and split, the classes, the rows per split."""

    digest: str
    classes: tuple[str, ...]
    rows: dict[str, int]


def read_content(images: DataFrame) -> Content:
    """Return the contents of a version, with a digest independent of the order of rows and the layout of files.

    The digest is the exclusive or of the rows' SHA-256 (240 bits of it), per split and label: rows are distinct by
    key, so that no row can cancel another.
    """
    hashed = F.sha2(F.concat_ws("|", "sha256", "label", "split"), 256)
    parts = [
        F.bit_xor(F.conv(F.substring(hashed, 1 + 15 * part, 15), 16, 10).cast("long")).alias(f"part{part}")
        for part in range(4)
    ]
    groups = images.groupBy("split", "label").agg(F.count("*").alias("rows"), *parts).collect()
    summary = sorted(
        [row["split"], row["label"], row["rows"], *(row[f"part{part}"] for part in range(4))] for row in groups
    )
    rows = {split: sum(row["rows"] for row in groups if row["split"] == split) for split in SPLITS}
    return Content(
        digest=hashlib.sha256(json.dumps(summary).encode()).hexdigest(),
        classes=tuple(sorted({row["label"] for row in groups})),
        rows=rows,
    )


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
    decisive = {"format": FORMAT, "content": content.digest, "settings": cache_config.decisive()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def materialize_cache(
    cache_config: CacheConfig, table: TableRef, storage: Storage, spark_config: SparkConfig
) -> tuple[CacheRef, bool]:
    """Build the cache of one Delta version unless it exists, then sweep the other caches.

    Returns:
        The cache, and whether this call built it.

    Raises:
        WrongInput: Fewer than two classes, an empty split, or a disk that is too small or not writable.
        DiskFull: The disk was full before the cache was complete; the partial cache is removed.
    """
    ref, built = _find_or_build(cache_config, table, storage, spark_config)
    with CacheReadLock(ref.url):
        sweep_caches(storage.cache, cache_config)
    return ref, built


def _find_or_build(
    cache_config: CacheConfig, table: TableRef, storage: Storage, spark_config: SparkConfig
) -> tuple[CacheRef, bool]:
    if found := find_cache(storage.cache, table, cache_config):
        logger.info("%s exists already: nothing to build", found.url)
        return found, False
    check_writable(storage.home, "storage.home")
    check_writable(storage.cache, "storage.cache")
    with spark_session(spark_config, storage) as spark:
        images = snapshots.read_version(spark, table)
        content = read_content(images.select("sha256", "label", "split"))
        check_content(content, table)
        url = f"{storage.cache.rstrip('/')}/{cache_key(content, cache_config)}"
        filesystem, root = file_system(url)
        filesystem.makedirs(storage.cache, exist_ok=True)
        # One process builds; the others wait for it, then find its cache.
        with exclusive_lock(url, spark), translate_disk_full(storage.cache, storage.home):
            if found := whole_cache(url, cache_config):
                logger.info("%s exists already: nothing to build", url)
                return found, False
            check_disk(url, cache_bytes(sum(content.rows.values()), cache_config))
            discard(url)  # Left by a killed build, or damaged.
            filesystem.makedirs(root, exist_ok=True)
            try:
                check_visible(spark, url, "storage.cache")
                manifest = _build(spark, images, content, cache_config, table, url, storage)
                remove_unnamed(url, manifest)
                ref = write_manifest(url, manifest)
            except BaseException:
                discard(url)  # A full disk would otherwise stay full.
                raise
    logger.info("%s: %s", url, ", ".join(f"{split} {part.rows} rows" for split, part in manifest.splits.items()))
    return ref, True


def _build(
    spark: SparkSession,
    images: DataFrame,
    content: Content,
    cache_config: CacheConfig,
    table: TableRef,
    url: str,
    storage: Storage,
) -> CacheManifest:
    groups = {split: rows_per_group(rows, cache_config) for split, rows in content.rows.items()}
    per_file = {split: rows_per_file(rows, cache_config) for split, rows in groups.items()}
    starts = plan_files(spark, table, per_file, storage)
    writer = make_writer(url, cache_config, groups, per_file, count_ended_tasks(spark.sparkContext))
    total, cores = sum(content.rows.values()), num_task_slots(spark)
    schema = spark.createDataFrame(pa.Table.from_pylist([], schema=CACHE_PART_ARROW)).schema
    written = (
        with_files(spark, images, starts, content.classes)
        .repartition(num_tasks(total, cores, least=cores * 2), "split", "file")
        .sortWithinPartitions("split", "sha256")
        .mapInArrow(writer, schema)  # type: ignore[arg-type]  # takes an iterator, as documented
    )
    with counted("cache", total):
        parts = written.collect()
    splits = {}
    for split in SPLITS:
        files = sorted((part for part in parts if part["split"] == split), key=lambda part: part["name"])
        splits[split] = CacheSplit(
            rows=sum(part["rows"] for part in files),
            rows_per_group=groups[split],
            files=tuple(CacheFile.model_validate(part.asDict()) for part in files),
        )
        assert splits[split].rows == content.rows[split], f"{splits[split].rows} of {content.rows[split]} rows written"
    return CacheManifest(
        format=FORMAT,
        table=table,
        content_digest=content.digest,
        settings=cache_config,
        classes=content.classes,
        splits=splits,
    )
