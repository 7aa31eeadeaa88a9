"""Bring the tables `images` and `files` in line with a source folder, reading only what is new or changed."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from tasks.config import EtlConfig, SparkConfig
from tasks.disk import check_writable, full_disk_named
from tasks.etl import delta
from tasks.etl.extract import make_decoder, make_reader
from tasks.etl.gates import FileCounts, check_bad_fraction, check_class_sizes
from tasks.etl.outcomes import (
    AGAIN,
    NEW,
    PICTURE,
    UNCHANGED,
    compare_files,
    kept_pictures,
    resolve_outcomes,
)
from tasks.etl.parts import PartTarget
from tasks.etl.remote import read_remote
from tasks.etl.settings import check_columns, check_properties, table_properties
from tasks.etl.source import Source, list_again_if_old, prepare_source
from tasks.etl.staging import staged_parts, sweep_killed_runs
from tasks.etl.tables import write_files, write_images
from tasks.refs import EtlReport
from tasks.schema import DELETED, DUPLICATE, FILES, IMAGES, LISTING_ARROW, QUARANTINED, READ_ARROW, STORED
from tasks.spark import keep_spark, spark_session
from tasks.storage import Storage
from tasks.turns import take_turn

logger = logging.getLogger("lakevision.etl")

FILES_A_TASK = 1024
"""Files a Spark task reads: few enough to keep all cores busy to the end, enough for a Parquet file of some size."""


@dataclass(frozen=True)
class _Tables:
    """The tables as a run finds them.

    Attributes:
        images: Path of the table `images`.
        files: Path of the table `files`.
        ledger: All rows of `files`, or None where there is none.
        held: sha256, label and split of the rows of `images`.
        versions: The version of each, None where there is none.
        replaced: Whether the contents come from another source or other labels, and are to be replaced.
    """

    images: str
    files: str
    ledger: DataFrame | None
    held: DataFrame
    versions: list[int | None]
    replaced: bool

    @property
    def known(self) -> DataFrame | None:
        """The ledger's rows of files that were there; of another source, equal paths and times mean nothing."""
        return None if self.ledger is None or self.replaced else self.ledger.where(F.col("outcome") != DELETED)


def _open_tables(spark: SparkSession, etl: EtlConfig, storage: Storage, wanted: dict[str, str]) -> _Tables:
    """Open the tables at their latest versions, and refuse those that this run must not write."""
    replaced = False
    rows: dict[str, DataFrame] = {}
    versions: list[int | None] = []
    for name, schema in (("images", IMAGES), ("files", FILES)):
        path = storage.table(name)
        snapshot = delta.newest_snapshot(spark, path)
        versions.append(None if snapshot is None else snapshot.table.version)
        if snapshot is None:
            continue
        replaced |= check_properties(snapshot.properties, wanted, path, etl.replace_source)
        rows[name] = delta.read_version(spark, snapshot.table)
        check_columns(rows[name].schema, schema, path)
    held = rows.get("images", spark.createDataFrame([], IMAGES)).select(*PICTURE)
    return _Tables(storage.table("images"), storage.table("files"), rows.get("files"), held, versions, replaced)


def _read_new(
    spark: SparkSession, listing: DataFrame, etl: EtlConfig, source: Source, num_files: int, target: PartTarget
) -> DataFrame:
    tasks = max(1, min(num_files, max(-(-num_files // FILES_A_TASK), spark.sparkContext.defaultParallelism)))
    files = listing.repartition(tasks)
    if isinstance(source.location, Path):
        reader = make_reader(source.location, etl, target)
    else:
        files, reader = read_remote(spark, files, source.location), make_decoder(etl, target)
    return files.mapInArrow(reader, from_arrow_schema(READ_ARROW))  # type: ignore[arg-type]  # an iterator in, as documented


def _ledger_columns(rows: DataFrame) -> DataFrame:
    return rows.select("path", "label", "split", "size", "modified_at", "sha256", "reason", "detail")


def _count(compared: DataFrame) -> list[Row]:
    groups = compared.groupBy("status", "label", "split", "outcome", "reason")
    return groups.agg(F.count("*").alias("count"), F.count("held").alias("held")).collect()


def _kept(etl: EtlConfig, tables: _Tables, listing: DataFrame, live: DataFrame) -> DataFrame:
    """Return the pictures that stay though their files are deleted."""
    if etl.deleted == "remove" or tables.ledger is None or tables.replaced:
        return tables.held.where(F.lit(False))
    return kept_pictures(tables.ledger, listing, live, tables.held)


def _check_gates(groups: list[Row], kept: DataFrame, etl: EtlConfig) -> FileCounts:
    """Refuse a source that must not reach the tables; return how many files have each outcome.

    Raises:
        WrongInput: Too many unusable files, or too small a class.
    """
    kept_rows = kept.groupBy("label", "split").count().collect()
    counts = FileCounts.of_groups(
        [(row["label"], row["split"], row["outcome"], row["reason"], row["count"]) for row in groups],
        [(row["label"], row["split"], row["count"]) for row in kept_rows],
    )
    check_bad_fraction(counts, etl)
    check_class_sizes(counts, etl)
    return counts


def prepare_ingest(etl: EtlConfig, storage: Storage, config: SparkConfig) -> Source:
    """Refuse what can be refused before anything is read, and list the source.

    Raises:
        WrongInput: As `prepare_source`, nothing can be written to the tables, or something else lies at their place.
    """
    check_writable(storage.home, "storage.home")
    check_writable(storage.tables, "storage.tables")
    for name in ("images", "files"):
        delta.check_table_path(storage.table(name))
    return prepare_source(etl, storage, config)


def ingest_images(etl: EtlConfig, storage: Storage, config: SparkConfig) -> EtlReport:
    """Bring the tables `images` and `files` in line with the source, in a Spark session of its own or the active one.

    Raises:
        WrongInput: As `prepare_ingest` and `ingest_source`.
    """
    with keep_spark():  # a URL is listed by the session that reads it
        source = prepare_ingest(etl, storage, config)
        with spark_session(config, storage) as spark:
            return ingest_source(spark, etl, source, storage)


def ingest_source(spark: SparkSession, etl: EtlConfig, source: Source, storage: Storage) -> EtlReport:
    """Bring the tables `images` and `files` in line with the listed source, one run at a time.

    `images` is committed first, `files` second; a run killed between the two is repaired by the next, and a run with
    nothing new commits nothing. A file whose size, time, label and predefined split are in the ledger is not read
    again.

    Raises:
        WrongInput: Settings or columns other than the tables', too many unusable files, or too small a class; the
            tables are unchanged.
        DiskFull: No room was left for the tables or for Spark's temporary files; the tables are unchanged, or `images`
            is done and the next run does `files`.
        TableChanged: Another program wrote to `images` meanwhile; both tables are as it left them.
    """
    with take_turn(storage.table("images"), spark), full_disk_named(storage.tables, storage.home):
        return _ingest(spark, etl, list_again_if_old(spark, etl, source, storage), storage)


def _ingest(spark: SparkSession, etl: EtlConfig, source: Source, storage: Storage) -> EtlReport:
    wanted = table_properties(etl, source.location)
    tables = _open_tables(spark, etl, storage, wanted)
    paths = (tables.images, tables.files)
    listing = spark.createDataFrame(source.listing)
    compared = compare_files(listing, tables.known, tables.held).persist()
    try:
        groups = [] if tables.known is None else _count(compared)
        num_again = sum(row["count"] for row in groups if row["status"] == AGAIN)
        num_new = sum(row["count"] for row in groups if row["status"] == NEW) if groups else source.listing.num_rows
        logger.info("%d files in %s, %d of them new or changed", source.listing.num_rows, source.location, num_new)
        kept = _kept(etl, tables, listing, compared.where(F.col("status") == UNCHANGED))
        # Work is all that is not: every file unchanged, every picture held, and nothing held that nothing stands for.
        work = (
            None in tables.versions
            or tables.replaced
            or any(row["status"] != UNCHANGED for row in groups)
            or sum(row["held"] for row in groups if row["outcome"] == STORED) + kept.count() != tables.held.count()
        )
        if work:
            with staged_parts(tables.images, tables.versions[0]) as target:
                counts = _bring_in_line(spark, etl, source, compared, num_new + num_again, tables, wanted, target)
        else:
            counts = _check_gates(groups, kept, etl)
            sweep_killed_runs(tables.images)
    finally:
        compared.unpersist()
    if tables.replaced:
        for path in paths:
            delta.set_properties(spark, path, wanted)
    images, files = (delta.latest(spark, path) for path in paths)
    report = EtlReport(
        images=images,
        files=files,
        stored=counts.outcomes[STORED],
        duplicates=counts.outcomes[DUPLICATE],
        quarantined=counts.outcomes[QUARANTINED],
        read=num_new,
        changed=[images.version, files.version] != tables.versions,
        classes=counts.classes,
    )
    logger.info(
        "%s is at version %d: %d stored, %d duplicates, %d quarantined%s",
        report.images.path,
        report.images.version,
        report.stored,
        report.duplicates,
        report.quarantined,
        "" if report.changed else "; nothing new, nothing committed",
    )
    return report


def _bring_in_line(
    spark: SparkSession,
    etl: EtlConfig,
    source: Source,
    compared: DataFrame,
    num_files: int,
    tables: _Tables,
    wanted: dict[str, str],
    target: PartTarget,
) -> FileCounts:
    """Read what must be read, and write both tables; return how many files have each outcome."""
    listed = compared.where(F.col("status").isin(NEW, AGAIN)).select(*LISTING_ARROW.names)
    unchanged = compared.where(F.col("status") == UNCHANGED)
    # Pictures are decoded once, into parts; both tables are written from what is known of them.
    read = _read_new(spark, listed, etl, source, num_files, target).persist()
    outcomes = resolve_outcomes(_ledger_columns(unchanged).unionByName(_ledger_columns(read))).persist()
    try:
        groups = outcomes.groupBy("label", "split", "outcome", "reason").count().collect()
        kept = _kept(etl, tables, outcomes, outcomes)
        counts = _check_gates(groups, kept, etl)
        write_images(spark, target, tables.versions[0], read, outcomes, tables.held, kept, wanted)
        write_files(spark, tables.files, tables.ledger, outcomes, wanted)
    finally:
        outcomes.unpersist()
        read.unpersist()
    return counts
