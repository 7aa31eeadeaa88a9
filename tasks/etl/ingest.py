"""Bring the tables `images` and `files` in line with a source folder, reading only what is new or changed."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.etl.commits import write_files, write_images
from tasks.etl.edges import Edges
from tasks.etl.extract import make_decoder, make_reader
from tasks.etl.gates import FileCounts, check_bad_fraction, check_class_sizes, small_splits
from tasks.etl.outcomes import Comparison
from tasks.etl.remote import read_remote
from tasks.etl.source import Source, list_again_if_old, prepare_source
from tasks.etl.staging import is_swept, staged_parts, sweep_killed_runs
from tasks.etl.stratify import SplitRule
from tasks.progress.count import counted
from tasks.refs import EtlReport
from tasks.schema import (
    DUPLICATE,
    FILES,
    FILES_ARROW,
    IMAGE_KEYS_ARROW,
    IMAGES,
    QUARANTINED,
    READ_ARROW,
    STORED,
)
from tasks.spark.progress import count_ended_tasks
from tasks.spark.session import NeedsSpark, keep_spark, without_spark_first
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import delta, rewriting, snapshots
from tasks.tables.parts import PartTarget
from tasks.tables.properties import (
    OTHER_TABLES,
    check_columns,
    check_properties,
    continued,
    source_property,
    table_properties,
)
from tasks.tables.relations import Relations

logger = logging.getLogger("lakevision.etl")

FILES_A_TASK = 1024
"""Files a Spark task reads: few enough to keep all cores busy to the end, enough for a Parquet file of some size."""


@dataclass(frozen=True)
class _Tables:
    """The tables as a run finds them.

    Attributes:
        images: Path of the table `images`.
        files: Path of the table `files`.
        ledger: All rows of `files`.
        held: sha256, label and split of the rows of `images`.
        versions: The version of each, None where there is none.
        replaced: Whether the contents come from another source or other labels, and are to be replaced.
        etl: The settings of the run; what tables that are there decide is as it is there.
        properties: What tables of these settings remember.
    """

    images: str
    files: str
    ledger: pa.Table
    held: pa.Table
    versions: list[int | None]
    replaced: bool
    etl: EtlConfig
    properties: dict[str, str]


def _open_tables(spark: SparkSession | None, etl: EtlConfig, storage: Storage, source: Source) -> _Tables:
    """Open the tables at their latest versions, and refuse those that this run must not write."""
    found = {name: snapshots.newest_snapshot(spark, storage.table(name)) for name in ("images", "files")}
    for there in filter(None, found.values()):
        etl = continued(etl, there.properties)
    made_with = next((there.properties for there in found.values() if there is not None), {})
    wanted = table_properties(etl, source_property(source.location, storage.digits, made_with))
    replaced = False
    rows = {"images": IMAGE_KEYS_ARROW.empty_table(), "files": FILES_ARROW.empty_table()}
    versions: list[int | None] = []
    for name, schema in (("images", IMAGES), ("files", FILES)):
        path = storage.table(name)
        snapshot = found[name]
        versions.append(None if snapshot is None else snapshot.table.version)
        if snapshot is None:
            continue
        replaced |= check_properties(snapshot.properties, wanted, path, etl.replace_source)
        check_columns(snapshot.schema, schema, path)
        rows[name] = snapshots.read_columns(spark, snapshot.table, rows[name].schema)
    paths = (storage.table("images"), storage.table("files"))
    return _Tables(*paths, rows["files"], rows["images"], versions, replaced, etl, wanted)


def _read_new(spark: SparkSession, listing: pa.Table, etl: EtlConfig, source: Source, target: PartTarget) -> pa.Table:
    """Read the listed files, their images into parts of `target`; return columns of READ_ARROW."""
    if not listing.num_rows:
        return READ_ARROW.empty_table()
    # Images are decoded once, into parts; both tables are written from what is known of them.
    cores = spark.sparkContext.defaultParallelism
    rounds = -(-listing.num_rows // (FILES_A_TASK * cores))
    tasks = min(listing.num_rows, rounds * cores)  # full rounds: no core waits for another's last task
    files = spark.createDataFrame(listing).repartition(tasks)
    # Twice as many parts pay only where copying them does not.
    is_large = (pc.sum(listing["size"]).as_py() or 0) > rewriting.DRIVER_BYTES
    edges = Edges.of(etl, listing) if is_large and etl.split_by == "stratified" else None
    ended = count_ended_tasks(spark.sparkContext)
    if isinstance(source.location, Path):
        reader = make_reader(source.location, etl, target, edges, ended)
    else:
        files, reader = read_remote(spark, files, source.location), make_decoder(etl, target, edges, ended)
    rows = files.mapInArrow(reader, from_arrow_schema(READ_ARROW))  # type: ignore[arg-type]  # an iterator in, as documented
    with counted("etl", listing.num_rows):
        return rows.toArrow()


def _check_gates(compared: Comparison, etl: EtlConfig) -> FileCounts:
    """Refuse a source that must not reach the tables; return how many files have each outcome.

    Raises:
        WrongInput: Too many unusable files, or too small a class.
    """
    counts = FileCounts.of_groups(compared.groups(), compared.kept_groups())
    check_bad_fraction(counts, etl)
    check_class_sizes(counts, etl)
    for sentence in small_splits(counts, etl):
        logger.warning(sentence)
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
    """Bring the tables `images` and `files` in line with the source, as `ingest_source`.

    Raises:
        WrongInput: As `prepare_ingest` and `ingest_source`.
    """
    with keep_spark():  # a URL is listed by the session that reads it
        return ingest_source(etl, prepare_ingest(etl, storage, config), storage, config)


def ingest_source(etl: EtlConfig, source: Source, storage: Storage, config: SparkConfig) -> EtlReport:
    """Bring the tables `images` and `files` in line with the listed source, one run at a time.

    Where both are on a local disk and in line with a local folder already, Spark does not start; it does where files
    are looked at again in every run, those of READ_AGAIN.

    `images` is committed first, `files` second; a run killed between the two is repaired by the next, and a run with
    nothing new commits nothing. A file whose size, time, label and predefined split are in the ledger is not read
    again.

    Raises:
        WrongInput: Settings or columns other than the tables', too many unusable files, or too small a class; the
            tables are unchanged.
        DiskFull: No room was left for the tables or for Spark's temporary files; the tables are unchanged, or `images`
            is done and the next run does `files`.
        TableChanged: Another program wrote to one of the tables meanwhile; that is as it left it, and the next run
            brings both in line.
    """

    def ingest(spark: SparkSession | None) -> EtlReport:
        nonlocal source  # listed again once, though it may be tried twice
        with exclusive_lock(storage.table("images"), spark), translate_disk_full(storage.tables, storage.home):
            source = list_again_if_old(spark, etl, source, storage)
            return _ingest(spark, etl, source, storage)

    return without_spark_first(ingest, config, storage)


def _ingest(spark: SparkSession | None, etl: EtlConfig, source: Source, storage: Storage) -> EtlReport:
    tables = _open_tables(spark, etl, storage, source)
    asked, etl = etl.split_by, tables.etl
    paths = (tables.images, tables.files)
    afresh = None in tables.versions or tables.replaced
    if spark is None and afresh:
        raise NeedsSpark
    with Relations(storage) as relations:
        compared = Comparison(
            relations,
            source.listing,
            tables.ledger,
            tables.held,
            replaced=tables.replaced,
            keep_deleted=etl.deleted == "keep",
            rule=SplitRule.of(etl) if etl.split_by == "stratified" else None,
        )
        num_new = compared.num_new()
        in_line = not afresh and compared.is_in_line()
        # What a killed run left is swept only when its JVM is gone, which takes one of ours to know.
        if spark is None and not (in_line and all(map(is_swept, paths))):
            raise NeedsSpark
        logger.info("%d files in %s, %d of them new or changed", source.listing.num_rows, source.location, num_new)
        if etl.split_by != asked:
            # Not refused: forms and deployments write defaults out, so nobody can tell whether a user asked for it.
            logger.info(
                "etl.split_by is %s, but '%s' was made with %s and continues with it, so that no image changes sides: "
                "for another split give %s",
                asked, tables.images, etl.split_by, OTHER_TABLES,
            )  # fmt: skip
        if spark is not None and not in_line:
            counts = _bring_in_line(spark, source, compared, tables)
        else:
            compared.resolve(READ_ARROW.empty_table())
            counts = _check_gates(compared, etl)
            for path in paths if spark is not None else ():
                sweep_killed_runs(path)
    if spark is not None and tables.replaced:
        for path in paths:
            delta.set_properties(spark, path, tables.properties)
    images, files = (snapshots.latest(spark, path) for path in paths)
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
    source: Source,
    compared: Comparison,
    tables: _Tables,
) -> FileCounts:
    """Read what must be read, and write both tables; return how many files have each outcome."""
    images_version, files_version = tables.versions
    etl = tables.etl
    with staged_parts(tables.images, images_version) as target:
        compared.resolve(_read_new(spark, compared.to_read(), etl, source, target))
        counts = _check_gates(compared, etl)
        write_images(spark, target, images_version, compared, tables.properties)
    with staged_parts(tables.files, files_version) as target:
        write_files(spark, target, files_version, compared, tables.properties)
    return counts
