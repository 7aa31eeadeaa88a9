"""Bring the tables `images` and `files` in line with a source folder, reading only what is new or changed."""

import logging
from collections import Counter
from pathlib import Path

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.config import BUILTIN_DIGITS, EtlConfig, SparkConfig
from tasks.errors import WrongInput
from tasks.etl import delta
from tasks.etl.digits import write_digits
from tasks.etl.extract import make_reader
from tasks.etl.listing import check_source, list_images, source_folder
from tasks.etl.outcomes import NEW, READ_AGAIN, UNCHANGED, compare_files, resolve_outcomes
from tasks.refs import EtlReport
from tasks.schema import DELETED, DUPLICATE, FILES, IMAGES, LISTING_ARROW, QUARANTINED, READ_ARROW, STORED
from tasks.spark import spark_session
from tasks.storage import Storage

logger = logging.getLogger("lakevision.etl")

IMAGES_PROPERTIES = {
    "delta.enableChangeDataFeed": "true",
    # A model's version of the data stays readable as long as the model is there, not the 30 days of Delta's default;
    # maintenance keeps its files, this keeps the log that names them.
    "delta.logRetentionDuration": "interval 36500 days",
}

FILES_A_TASK = 256
"""Files a Spark task reads: few enough to keep all cores busy to the end, enough to hide its own cost."""


def table_properties(etl: EtlConfig, source: Path) -> dict[str, str]:
    """Return what the tables' properties say of a run, so that one with other settings is refused, not mixed in."""
    return {
        "lakevision.source": str(source),
        "lakevision.stored_side": str(etl.stored_side),
        "lakevision.split_seed": str(etl.split_seed),
        "lakevision.val_fraction": str(etl.val_fraction),
        "lakevision.test_fraction": str(etl.test_fraction),
    }


def check_properties(found: dict[str, str], wanted: dict[str, str], path: str, replace_source: bool) -> None:
    """Refuse settings other than those the table was made with.

    Raises:
        WrongInput: Names the setting, its value here and in the table.
    """
    for name, value in wanted.items():
        if found.get(name) == value or (name == "lakevision.source" and replace_source):
            continue
        if name == "lakevision.source":
            raise WrongInput(
                f"source is '{value}', but the table '{path}' was made from '{found.get(name)}': give other tables "
                "(storage.tables or LAKEVISION_HOME), or set etl.replace_source to true to replace its contents"
            )
        setting = name.removeprefix("lakevision.")
        raise WrongInput(
            f"etl.{setting} is {value}, but the table '{path}' was made with {found.get(name)}: "
            "use that value, or other tables (storage.tables or LAKEVISION_HOME)"
        )


def _read_new(spark: SparkSession, listing: DataFrame, etl: EtlConfig, source: Path, num_files: int) -> DataFrame:
    reader = make_reader(source, etl.stored_side, etl.max_pixels, etl.split_seed, etl.val_fraction, etl.test_fraction)
    tasks = max(1, min(num_files, max(-(-num_files // FILES_A_TASK), spark.sparkContext.defaultParallelism)))
    schema = spark.createDataFrame(pa.Table.from_pylist([], schema=READ_ARROW)).schema
    return listing.repartition(tasks).mapInArrow(reader, schema)  # type: ignore[arg-type]  # an iterator in, as documented


def _ledger_columns(rows: DataFrame) -> DataFrame:
    return rows.select("path", "label", "size", "modified_at", "sha256", "reason", "detail")


def _check_bad_fraction(outcomes: DataFrame, etl: EtlConfig) -> Counter[str]:
    """Refuse a source with too many unusable files; return how many files have each outcome."""
    counts: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for row in outcomes.groupBy("outcome", "reason").count().collect():
        counts[row["outcome"]] += row["count"]
        if row["outcome"] == QUARANTINED:
            bad[row["reason"]] += row["count"]
    if bad.total() > etl.max_bad_fraction * counts.total():
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(bad.items()))
        raise WrongInput(
            f"{bad.total()} of {counts.total()} files cannot be used ({reasons}), more than etl.max_bad_fraction "
            f"{etl.max_bad_fraction}: mend the source or raise the fraction; the tables are as they were"
        )
    return counts


def _write_images(spark: SparkSession, path: str, read: DataFrame, outcomes: DataFrame, values: dict[str, str]) -> None:
    """Insert pictures that are stored now and not there yet, delete those whose last file went; at most one commit."""
    stored = outcomes.where(F.col("outcome") == STORED).select("path", "sha256")
    rows = read.join(stored, on=["path", "sha256"], how="left_semi").withColumn("ingested_at", F.current_timestamp())
    if not delta.has_table(spark, path):
        new = delta.with_schema(rows, IMAGES)
        delta.create_table(path, new, values | IMAGES_PROPERTIES)
        return
    held = spark.read.format("delta").load(path).select("sha256", "label")
    insert = delta.with_schema(rows.join(held, on=["sha256", "label"], how="left_anti"), IMAGES)
    kept = outcomes.where(F.col("outcome") == STORED).select("sha256", "label")
    gone = held.join(kept, on=["sha256", "label"], how="left_anti").select("sha256")
    if insert.isEmpty() and gone.isEmpty():
        return
    change = insert.withColumn("gone", F.lit(False)).unionByName(
        # A picture that moved to another class folder is deleted under its old label and inserted under the new:
        # one row of the merge must do both, so the insert updates.
        gone.join(insert, on="sha256", how="left_anti").withColumn("gone", F.lit(True)),
        allowMissingColumns=True,
    )
    values_of_s = {field.name: f"s.{field.name}" for field in IMAGES}
    (
        delta.merge(spark, path, change, ("sha256",))
        .whenMatchedDelete("s.gone")
        .whenMatchedUpdate("NOT s.gone", values_of_s)
        .whenNotMatchedInsert("NOT s.gone", values_of_s)
        .execute()
    )


def _write_files(
    spark: SparkSession, path: str, ledger: DataFrame | None, outcomes: DataFrame, values: dict[str, str]
) -> None:
    """Bring the ledger in line with the outcomes; at most one commit."""
    seen = delta.with_schema(outcomes.withColumn("seen_at", F.current_timestamp()), FILES)
    if ledger is None:
        delta.create_table(path, seen, values)
        return
    compared = [name for name in FILES.names if name != "seen_at"]
    changed = seen.join(
        ledger.select(*(F.col(name).alias(f"old_{name}") for name in compared)),
        on=[F.col(name).eqNullSafe(F.col(f"old_{name}")) for name in compared],
        how="left_anti",
    )
    gone = (
        ledger.where(F.col("outcome") != DELETED)
        .join(seen, on="path", how="left_anti")
        .withColumns(
            {"outcome": F.lit(DELETED), "reason": F.lit(None), "detail": F.lit(None), "seen_at": F.current_timestamp()}
        )
    )
    change = changed.unionByName(delta.with_schema(gone, FILES)).persist()
    if not change.isEmpty():
        delta.merge(spark, path, change, ("path",)).whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
    change.unpersist()


def prepare_source(etl: EtlConfig, storage: Storage) -> Path:
    """Return the source folder, with the built-in digits written out where they are asked for.

    Raises:
        WrongInput: As `check_source`.
    """
    source = source_folder(etl.source, storage)
    if etl.source == BUILTIN_DIGITS:
        write_digits(source)
    check_source(source)
    return source


def ingest_images(etl: EtlConfig, storage: Storage, config: SparkConfig) -> EtlReport:
    """Bring the tables `images` and `files` in line with the source.

    `images` is committed first, `files` second; a run killed between the two is repaired by the next, and a run with
    nothing new commits nothing. A file whose size and time are in the ledger is not read again.

    Raises:
        WrongInput: The source, settings other than the tables', or too many unusable files; the tables are unchanged.
    """
    source = prepare_source(etl, storage)
    images, files = storage.table("images"), storage.table("files")
    delta.check_table_path(images)
    delta.check_table_path(files)
    wanted = table_properties(etl, source)
    with spark_session(config, storage) as spark:
        report = _ingest(spark, etl, source, images, files, wanted)
    logger.info(
        "%s is at version %d: %d stored, %d duplicates, %d quarantined%s",
        images,
        report.images.version,
        report.stored,
        report.duplicates,
        report.quarantined,
        "" if report.changed else "; nothing new, nothing committed",
    )
    return report


def _count_classes(spark: SparkSession, images: str) -> dict[str, dict[str, int]]:
    rows = spark.read.format("delta").load(images).groupBy("label", "split").count().collect()
    classes: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda found: (found["label"], found["split"])):
        classes.setdefault(row["label"], {})[row["split"]] = row["count"]
    return classes


def _ingest(
    spark: SparkSession, etl: EtlConfig, source: Path, images: str, files: str, wanted: dict[str, str]
) -> EtlReport:
    tables_exist = True
    other_source = False
    for path, schema in ((images, IMAGES), (files, FILES)):
        if not delta.has_table(spark, path):
            tables_exist = False
            continue
        delta.check_schema(spark, path, schema)
        found = delta.properties(spark, path)
        check_properties(found, wanted, path, etl.replace_source)
        other_source |= found.get("lakevision.source") != wanted["lakevision.source"]
    ledger = delta.read_version(spark, delta.latest(spark, files)) if delta.has_table(spark, files) else None
    # With another source, equal paths, sizes and times do not mean equal files.
    known = spark.createDataFrame([], FILES)
    if ledger is not None and not other_source:
        known = ledger.where(F.col("outcome") != DELETED)
    held = spark.createDataFrame([], IMAGES)
    if delta.has_table(spark, images):
        held = delta.read_version(spark, delta.latest(spark, images))
    held = held.select("sha256", "label")
    before = _versions(spark, images, files)
    listed = list_images(source)
    compared = compare_files(spark.createDataFrame(listed), known, held).persist()
    groups = compared.groupBy("status", "outcome", "reason").agg(
        F.count("*").alias("rows"), F.count("held").alias("held")
    )
    found_groups = groups.collect()
    num_new = sum(row["rows"] for row in found_groups if row["status"] == NEW)
    logger.info("%d files in %s, %d of them new or changed", listed.num_rows, source, num_new)
    expected = sum(row["held"] for row in found_groups if row["status"] == UNCHANGED and row["outcome"] == STORED)
    # Work is all that is not: every file unchanged, every picture held, and nothing held that no file stands for.
    work = (
        not tables_exist
        or other_source
        or any(row["status"] != UNCHANGED or row["reason"] in READ_AGAIN for row in found_groups)
        or expected != held.count()
    )
    if work:
        try:
            counts = _bring_in_line(spark, etl, source, compared, images, files, ledger, wanted)
            if other_source:
                for path in (images, files):
                    delta.set_properties(spark, path, wanted)
        finally:
            compared.unpersist()
    else:
        compared.unpersist()
        counts = Counter({row["outcome"]: 0 for row in found_groups})
        for row in found_groups:
            counts[row["outcome"]] += row["rows"]
    return EtlReport(
        images=delta.latest(spark, images),
        files=delta.latest(spark, files),
        stored=counts[STORED],
        duplicates=counts[DUPLICATE],
        quarantined=counts[QUARANTINED],
        read=num_new,
        changed=_versions(spark, images, files) != before,
        classes=_count_classes(spark, images),
    )


def _versions(spark: SparkSession, *paths: str) -> list[int | None]:
    return [delta.latest(spark, path).version if delta.has_table(spark, path) else None for path in paths]


def _bring_in_line(
    spark: SparkSession,
    etl: EtlConfig,
    source: Path,
    compared: DataFrame,
    images: str,
    files: str,
    ledger: DataFrame | None,
    wanted: dict[str, str],
) -> Counter[str]:
    """Read what must be read, and write both tables; return how many files have each outcome."""
    again = F.coalesce(F.col("reason").isin(*READ_AGAIN), F.lit(False))
    new = compared.where((F.col("status") == NEW) | ((F.col("status") == UNCHANGED) & again))
    unchanged = compared.where((F.col("status") == UNCHANGED) & ~again)
    # Spilled to disk: pictures are decoded once, and both tables are written from the result.
    read = _read_new(spark, new.select(*LISTING_ARROW.names), etl, source, new.count()).persist(StorageLevel.DISK_ONLY)
    outcomes = resolve_outcomes(_ledger_columns(unchanged).unionByName(_ledger_columns(read))).persist()
    try:
        counts = _check_bad_fraction(outcomes, etl)
        _write_images(spark, images, read, outcomes, wanted)
        _write_files(spark, files, ledger, outcomes, wanted)
    finally:
        outcomes.unpersist()
        read.unpersist()
    return counts
