"""The build of a cache from a Delta version: decoded pixels in Parquet files of equal row groups."""

import logging

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tasks.cache.content import Content, cache_key, check_content, has_content, read_content, stored_side_of
from tasks.cache.manifest import (
    FORMAT,
    CacheFile,
    CacheManifest,
    CacheSplit,
    find_cache,
    write_manifest,
)
from tasks.cache.plan import plan_files, with_files
from tasks.cache.read_lock import CacheReadLock
from tasks.cache.sizes import cache_bytes, check_disk, rows_per_file, rows_per_group
from tasks.cache.sweep import discard, remove_unnamed, sweep_caches
from tasks.cache.write import make_writer
from tasks.config.cache import CacheConfig
from tasks.config.storage import SparkConfig
from tasks.object_store import file_system
from tasks.progress.count import counted
from tasks.refs import CacheRef, TableRef
from tasks.schema import CACHE_PART_ARROW, SPLITS
from tasks.spark.cluster import check_visible, num_task_slots
from tasks.spark.session import spark_session
from tasks.spark.worker_log import count_ended_tasks, num_tasks
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots

logger = logging.getLogger("lakevision.cache")


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
        content = read_content(images, table, stored_side_of(spark, table))
        check_content(content, table)
        url = f"{storage.cache.rstrip('/')}/{cache_key(content, cache_config)}"
        filesystem, root = file_system(url)
        filesystem.makedirs(storage.cache, exist_ok=True)
        # One process builds; the others wait for it, then find its cache.
        with exclusive_lock(url, spark), translate_disk_full(storage.cache, storage.home):
            if found := find_cache(storage.cache, table, cache_config, lambda old: has_content(old, content, table)):
                logger.info("%s has the same content: nothing to build", found.url)
                return found, False
            check_disk(url, cache_bytes(sum(content.rows.values()), cache_config))
            discard(url)  # Left by a killed build, or damaged.
            filesystem.makedirs(root, exist_ok=True)
            try:
                check_visible(spark, url, "storage.cache")
                manifest = _build(spark, images, content, cache_config, table, url, storage)
                remove_unnamed(url, manifest)
                ref = write_manifest(url, manifest).model_copy(update={"table": table})
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
        stored_digest=content.stored_digest,
        settings=cache_config,
        classes=content.classes,
        splits=splits,
    )
