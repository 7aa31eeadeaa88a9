"""The build of a cache from a Delta version: decoded pixels in Parquet files of equal row groups.

Digests of a version's rows identify its content without reading images. Sorted keys give each image its file, so that
images are shuffled once.
"""

import hashlib
import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.cache.left_out import check_left_out, with_paths
from tasks.cache.manifest import (
    FORMAT,
    CacheFile,
    CacheManifest,
    CacheSplit,
    QuarantinedImage,
    find_cache,
    write_manifest,
)
from tasks.cache.sweep import CacheReadLock, discard, remove_unnamed, sweep_caches
from tasks.cache.write import cache_bytes, check_disk, rows_per_file, rows_per_group
from tasks.cache.write_images import WRITTEN_COLUMNS, make_writer
from tasks.config.cache import CacheConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.model_package.description import AS_BEFORE, Decoding
from tasks.object_store import file_system
from tasks.progress.count import counted
from tasks.refs import SPLITS, TRAIN, CacheRef, TableRef
from tasks.schema import IMAGES_ARROW
from tasks.spark.cluster import check_visible, num_task_slots
from tasks.spark.scratch import scratch_root
from tasks.spark.session import spark_session
from tasks.spark.worker_log import count_ended_tasks, num_tasks
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots
from tasks.tables.delta import last_change
from tasks.tables.properties import DECODE_VERSION_PROPERTY, SAMPLE_BITS_PROPERTY, STORED_SIDE_PROPERTY, with_defaults
from tasks.tables.relations import Relations

logger = logging.getLogger("lakevision.cache")


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


def storing_of(spark: SparkSession, table: TableRef) -> tuple[int | None, Decoding]:
    """Return the longest side of images that a table stores unchanged, in pixels, and the decoding of its images.

    A table has one value of each for ever: the flow etl refuses another. The side is None if none is recorded.
    """
    snapshot = snapshots.newest_snapshot(spark, table.path)
    found = with_defaults({} if snapshot is None else snapshot.properties)
    side, bits = found.get(STORED_SIDE_PROPERTY, ""), found[SAMPLE_BITS_PROPERTY]
    decoding = Decoding.model_validate(
        {"version": int(found[DECODE_VERSION_PROPERTY]), "sample_bits": int(bits) if bits else None}
    )
    return int(side) if side.isdecimal() else None, decoding


def read_content(images: DataFrame, table: TableRef, stored_side: int | None) -> Content:
    """Return the contents of a version, with digests independent of the order of rows and the layout of files.

    A digest is the exclusive or of the rows' SHA-256 (240 bits of it), per split and label: rows are distinct by
    key, so that no row can cancel another. No content is read: `_stored_bytes` identifies the bytes by other columns.

    Args:
        images: Rows of the version.
        table: The version.
        stored_side: As `storing_of`.
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


def warn_of_scaling(image_size: int, stored_side: int | None) -> None:
    """Log a warning if the images of a cache are larger than the table stores them; None: it does not record it."""
    if stored_side is not None and image_size > stored_side:
        logger.warning(
            "cache.image_size is %d, and etl.stored_side of its table %d: larger images were scaled down and are "
            "scaled up again",
            *(image_size, stored_side),
        )


def has_content(cache: CacheManifest, content: Content, table: TableRef, decoding: Decoding) -> bool:
    """Return whether a cache has the content of a table version, decoded as the table's images are.

    Caches of older releases do not record the stored bytes. Such a cache has them if it was built from the same images
    of the same table, since a table has one `stored_side`.
    """
    if cache.decoding != decoding:
        return False
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
            f"'{table.path}' version {table.version} has the classes {list(content.classes)}",
            way_out="a classifier needs at least two",
        )
    if empty := [split for split, rows in content.rows.items() if rows == 0]:
        split, named = empty[0], "' or '".join(empty)
        missing = f"{len(empty)} image{'s' if len(empty) > 1 else ''}"
        change = "lower etl.val_fraction or etl.test_fraction" if split == TRAIN else f"raise etl.{split}_fraction"
        raise WrongInput(
            f"no image of '{table.path}' version {table.version} is in the split '{named}'",
            setting="" if split == TRAIN else f"etl.{split}_fraction",
            way_out=f"add at least {missing} (where splits are predefined, to it), or {change} for a new table",
        )


def cache_key(content: Content, cache_config: CacheConfig, decoding: Decoding) -> str:
    """Return the name of a cache: a hash of content and settings, not of the version, which OPTIMIZE changes too."""
    decisive = {"format": FORMAT, "stored": content.stored_digest, "settings": cache_config.decisive()}
    if decoding != AS_BEFORE:
        decisive["decoding"] = decoding.model_dump()
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


KEYS_ARROW = pa.schema([IMAGES_ARROW.field(name) for name in ("sha256", "split")])

RANGES_ARROW = pa.schema(
    [("split", pa.string()), ("prefix", pa.string()), ("before", pa.int32()), ("within", pa.list_(pa.string()))]
)
"""Files of the images whose sha256 has a prefix: the number of files that begin before it, and the starts within it."""

FileStarts = dict[str, list[str]]
"""First sha256 of each cache file after the first, in ascending order, by split."""


def plan_files(
    spark: SparkSession | None,
    table: TableRef,
    rows_per_file: Mapping[str, int],
    storage: Storage,
    left_out: Collection[str] = (),
) -> FileStarts:
    """Return the first sha256 of each cache file after the first, by split.

    Images are sorted by sha256, an order that is as good as shuffled and the same on every machine. Only the keys are
    sorted, on the local disk if they do not fit into memory.

    Args:
        spark: The session.
        table: The version.
        rows_per_file: Number of rows of a file, by split.
        storage: Locations, for temporary files.
        left_out: sha256 of images that the cache does not have.
    """
    starts: dict[str, list[str]] = {split: [] for split in rows_per_file}
    num_rows = dict.fromkeys(rows_per_file, 0)
    with Relations(storage) as relations:
        relations.add("images", snapshots.version_rows(spark, table, KEYS_ARROW, scratch_root(storage)))
        for batch in relations.batches("FROM images ORDER BY split, sha256", KEYS_ARROW):
            for split, step in rows_per_file.items():
                hashes = batch.filter(pc.equal(batch["split"], split))["sha256"]
                if left_out:
                    hashes = hashes.filter(pc.invert(pc.is_in(hashes, pa.array(left_out))))
                starts[split] += hashes[-num_rows[split] % step :: step].to_pylist()
                num_rows[split] += len(hashes)
    return {split: hashes[1:] for split, hashes in starts.items()}


def with_files(spark: SparkSession, images: DataFrame, starts: FileStarts, classes: Sequence[str]) -> DataFrame:
    """Return each image's place in the cache: split, file, sha256, label_index and content; nothing is shuffled."""
    digits = len(f"{max(map(len, starts.values())):x}")  # at least as many prefixes as files
    prefixes = [f"{number:0{digits}x}" for number in range(16**digits)]
    rows = []
    for split, hashes in starts.items():
        # Files that begin before the first sha256 with a prefix, and the few that begin within it.
        bounds = [bisect_left(hashes, prefix) for prefix in prefixes] + [len(hashes)]
        rows += [
            {"split": split, "prefix": prefix, "before": low, "within": hashes[low:high]}
            for prefix, low, high in zip(prefixes, bounds, bounds[1:], strict=False)
        ]
    ranges = spark.createDataFrame(pa.Table.from_pylist(rows, schema=RANGES_ARROW))
    labels = spark.createDataFrame(pa.table({"label_index": range(len(classes)), "label": list(classes)}))
    file = F.col("before") + F.size(F.filter("within", lambda start: start <= F.col("sha256")))
    return (
        images.withColumn("prefix", F.substring("sha256", 1, digits))
        .join(F.broadcast(ranges), on=["split", "prefix"], how="inner")
        .join(F.broadcast(labels), on="label", how="inner")
        .select("split", file.alias("file"), "sha256", "label_index", "content")
    )


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
    with closing(CacheReadLock(ref.url)):
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
        stored_side, decoding = storing_of(spark, table)
        warn_of_scaling(cache_config.image_size, stored_side)
        content = read_content(images, table, stored_side)
        check_content(content, table)
        url = f"{storage.cache.rstrip('/')}/{cache_key(content, cache_config, decoding)}"
        filesystem, root = file_system(url)
        filesystem.makedirs(storage.cache, exist_ok=True)
        # One process builds; the others wait for it, then find its cache.
        with exclusive_lock(url, spark), translate_disk_full(storage.cache, storage.home):
            if found := find_cache(
                storage.cache, table, cache_config, lambda old: has_content(old, content, table, decoding)
            ):
                logger.info("%s has the same content: nothing to build", found.url)
                return found, False
            check_disk(url, cache_bytes(sum(content.rows.values()), cache_config))
            discard(url)  # Left by a killed build, or damaged.
            filesystem.makedirs(root, exist_ok=True)
            try:
                check_visible(spark, url, "storage.cache")
                manifest = _build(spark, images, content, cache_config, decoding, table, url, storage)
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
    decoding: Decoding,
    table: TableRef,
    url: str,
    storage: Storage,
    quarantined: Sequence[QuarantinedImage] = (),
) -> CacheManifest:
    """Write the files of a cache; again without the images that cannot be decoded, if there are any.

    ETL has decoded them all, so such an image was stored by another release or program.
    """
    left_out = [image.sha256 for image in quarantined]
    num_bad = Counter(image.split for image in quarantined)
    rows_of = {split: rows - num_bad[split] for split, rows in content.rows.items()}
    check_content(replace(content, rows=rows_of), table)
    kept = images.where(~F.col("sha256").isin(left_out)) if left_out else images
    groups = {split: rows_per_group(rows, cache_config) for split, rows in rows_of.items()}
    per_file = {split: rows_per_file(rows, cache_config) for split, rows in groups.items()}
    starts = plan_files(spark, table, per_file, storage, left_out)
    writer = make_writer(url, cache_config, decoding, groups, per_file, count_ended_tasks(spark.sparkContext))
    total, cores = sum(rows_of.values()), num_task_slots(spark)
    written = (
        with_files(spark, kept, starts, content.classes)
        .repartition(num_tasks(total, cores, least=cores * 2), "split", "file")
        .sortWithinPartitions("split", "sha256")
        .mapInArrow(writer, WRITTEN_COLUMNS)
    )
    with counted("cache", total):
        parts = written.collect()
    files = [(part["split"], CacheFile.model_validate_json(part["file"])) for part in parts if part["file"]]
    if bad := [QuarantinedImage.model_validate_json(part["quarantined"]) for part in parts if part["quarantined"]]:
        check_left_out(images, sum(content.rows.values()), (*quarantined, *bad), table)
        everything = (*quarantined, *with_paths(spark, bad, storage))
        # A second copy needs disk space that was not checked, and would stay on a store.
        filesystem, root = file_system(url)
        for _, file in files:
            filesystem.rm_file(f"{root}/{file.name}")
        return _build(spark, images, content, cache_config, decoding, table, url, storage, everything)
    splits = {}
    for split in SPLITS:
        of_split = [file for its_split, file in files if its_split == split]
        splits[split] = CacheSplit(
            rows=sum(file.rows for file in of_split),
            rows_per_group=groups[split],
            files=tuple(sorted(of_split, key=lambda file: file.name)),
        )
        assert splits[split].rows == rows_of[split], f"{splits[split].rows} of {rows_of[split]} rows written"
    return CacheManifest(
        format=FORMAT,
        table=table,
        content_digest=content.digest,
        stored_digest=content.stored_digest,
        settings=cache_config,
        decoding=decoding,
        classes=content.classes,
        splits=splits,
        quarantined=tuple(quarantined),
    )
