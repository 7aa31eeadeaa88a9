"""Incremental ingestion: the tables `images` and `files` are synchronized with a source folder or URL."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.commits import is_swept, staged_parts, sweep_killed_runs, write_files, write_images
from tasks.etl.extract import Edges, make_decoder, make_reader
from tasks.etl.gates import (
    NUM_LISTED,
    FileCounts,
    check_bad_fraction,
    check_class_sizes,
    check_deletions,
    check_groups_fit,
    group_warnings,
    small_split_warnings,
)
from tasks.etl.groups import HASHES_ARROW, Grouping
from tasks.etl.labels import MAX_GROUPS
from tasks.etl.outcomes import Comparison
from tasks.etl.source import Source, newest_commits, prepare_source, read_remote, relist_if_outdated
from tasks.etl.stratify import SplitRule
from tasks.model_package.reasons import Reason
from tasks.progress.count import counted
from tasks.refs import EtlReport
from tasks.schema import (
    ADDED_TO_FILES,
    DUPLICATE,
    FILES,
    FILES_ARROW,
    IGNORED,
    IMAGE_KEYS_ARROW,
    IMAGES,
    QUARANTINED,
    READ_ARROW,
    STORED,
)
from tasks.spark.cluster import check_file_visible, check_visible, num_task_slots
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark, keep_spark, try_without_spark
from tasks.spark.worker_log import count_ended_tasks
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.tables import delta, properties, snapshots
from tasks.tables.delta_internals import Snapshot
from tasks.tables.direct_commits import DRIVER_BYTES
from tasks.tables.parquet_rows import ParquetRows, spool_rows
from tasks.tables.parts import PartTarget, make_row_writer, read_rows
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access
from tasks.text.forms import shown
from tasks.text.markup import markdown_text

logger = logging.getLogger("lakevision.etl")

FILES_PER_TASK = 1024
"""Files per Spark task: few enough that all cores stay busy to the end, enough that Parquet files are not tiny."""


@dataclass(frozen=True)
class Tables:
    """The tables as they are at the start of a run.

    Attributes:
        ledger: All rows of `files`.
        existing: sha256, label and split of the rows of `images`.
        hashes: sha256 and perceptual hash of these rows, where near-duplicates are groups.
        versions: Version of `images` and of `files`, None if the table does not exist.
        replaced: Whether the contents come from another source or other labels, and are replaced.
        etl: Settings of the run; those that existing tables determine have the tables' values.
        properties: Table properties that correspond to the settings.
        lacking: Columns that an existing table `files` of an earlier release lacks.
    """

    ledger: pa.Table | ParquetRows
    existing: pa.Table | ParquetRows
    hashes: pa.Table | ParquetRows
    versions: list[int | None]
    replaced: bool
    etl: EtlConfig
    properties: dict[str, str]
    lacking: list[StructField]


def open_tables(spark: SparkSession | None, etl: EtlConfig, storage: Storage, source: Source) -> Tables:
    """Open the tables at their latest versions, and check that this run may write to them.

    Raises:
        WrongInput: The settings or columns differ from the tables'.
        NeedsSpark: `spark` is None, and only Spark can read a table.
    """
    newest = {name: _open_table(spark, storage.table(name)) for name in ("images", "files")}
    found = {name: snapshot for name, snapshot in newest.items() if snapshot is not None}
    for existing in found.values():
        etl = properties.continued(etl, existing.properties)
    made_with = next((existing.properties for existing in found.values()), {})
    wanted = properties.table_properties(etl, properties.source_property(source.location, storage.digits, made_with))
    replaced = False
    schemas = {"images": IMAGE_KEYS_ARROW, "files": FILES_ARROW}
    rows: dict[str, pa.Table | ParquetRows] = {name: schema.empty_table() for name, schema in schemas.items()}
    lacking: list[StructField] = []
    for name, snapshot in found.items():
        path, columns = snapshot.table.path, FILES if name == "files" else IMAGES
        replaced |= properties.check_properties(snapshot.properties, wanted, path, etl.replace_source)
        properties.check_columns(snapshot.schema, columns, path, ADDED_TO_FILES if name == "files" else ())
        lacking += [column for column in columns if column.name not in snapshot.schema.names]
        rows[name] = snapshots.version_rows(spark, snapshot.table, schemas[name], scratch_root(storage))
    hashes = HASHES_ARROW.empty_table()
    if "images" in found and etl.split_group.by == "near_duplicates":
        hashes = snapshots.version_rows(spark, found["images"].table, HASHES_ARROW, scratch_root(storage))
    versions = [None if snapshot is None else snapshot.table.version for snapshot in newest.values()]
    return Tables(rows["files"], rows["images"], hashes, versions, replaced, etl, wanted, lacking)


def _open_table(spark: SparkSession | None, path: str) -> Snapshot | None:
    """Open the newest version of a table, after its creation by a run that was killed is completed."""
    found = snapshots.newest_snapshot(spark, path)
    if found is None or properties.SOURCE_PROPERTY in found.properties:
        return found
    if spark is None:
        raise NeedsSpark
    delta.complete_table(spark, path)
    return snapshots.newest_snapshot(spark, path)


def _read_new(
    spark: SparkSession, listing: pa.Table, etl: EtlConfig, source: Source, target: PartTarget, scratch: Path
) -> pa.Table | ParquetRows:
    """Read the listed files and write their images into parts of `target`; return rows with READ_ARROW's columns."""
    if not listing.num_rows:
        return READ_ARROW.empty_table()
    check_visible(spark, target.folder, "storage.tables")
    if isinstance(source.location, Path):
        check_file_visible(spark, str(source.location), listing["path"][0].as_py(), "source")
    # Images are decoded only once, when they are written into parts; both tables are committed from the returned rows.
    cores = num_task_slots(spark)
    rounds = -(-listing.num_rows // (FILES_PER_TASK * cores))
    tasks = min(listing.num_rows, rounds * cores)  # full rounds: no core is idle while another runs its last task
    files = spark.createDataFrame(listing).repartition(tasks)
    # Separate parts near the edges double the number of parts: worthwhile only if copying parts is expensive.
    is_large = (pc.sum(listing["size"]).as_py() or 0) > DRIVER_BYTES
    is_ranked = etl.split_by == "stratified" and etl.split_group.by == "none"
    edges = Edges.of(etl, listing) if is_large and is_ranked else None
    ended = count_ended_tasks(spark.sparkContext)
    if isinstance(source.location, Path):
        reader = make_reader(source.location, etl, target, edges, ended)
    else:
        files, reader = read_remote(spark, files, source.location), make_decoder(etl, target, edges, ended)
    writer = make_row_writer(reader, target, READ_ARROW)
    written = files.mapInArrow(writer, "name string")
    with counted("etl", listing.num_rows):
        names = [row["name"] for row in written.collect()]
    return spool_rows(read_rows(target, names, READ_ARROW), READ_ARROW, scratch)


def _check_gates(compared: Comparison, etl: EtlConfig, storage: Storage) -> FileCounts:
    """Check the source against the quality gates; return the numbers of files and images.

    Raises:
        WrongInput: There are too many unusable files, too many images would leave, or a class has too few images. All
            unusable files are in a CSV file, and the first of them are notes of the error.
    """
    counts = FileCounts.of_groups(compared.groups(), compared.kept_groups())
    num_failed, path, detail = compared.failed_reads()
    if num_failed:
        logger.warning(
            "%d files cannot be read now, such as %s (%s): their images stay, and the next run reads them again",
            num_failed, path, detail,
        )  # fmt: skip
        counts.reasons[Reason.UNREADABLE.value] += num_failed
    try:
        check_bad_fraction(counts, etl)
        check_deletions(*compared.deletions(), counts.images, etl)
        check_class_sizes(counts, etl)
        if compared.groups_found:
            check_groups_fit(compared.groups_found, counts, etl)
    except WrongInput as error:
        if not counts.reasons or error.setting == "etl.max_deleted_fraction":
            raise
        raise _with_unusable_files(error, compared, storage.logs / "unusable-files.csv") from None
    warnings = small_split_warnings(counts, etl)
    if found := compared.groups_found:
        logger.info(
            "%d images are in %d groups by %s, and %d are single",
            found.num_images, found.num_groups, etl.split_group.by, found.num_others,
        )  # fmt: skip
        warnings += group_warnings(found, counts, etl)
    for sentence in warnings:
        logger.warning(sentence)
    return counts


def _with_unusable_files(error: WrongInput, compared: Comparison, file: Path) -> WrongInput:
    """Write the files that cannot be used to a CSV file, log the first, and return the error with both."""
    first = compared.write_unusable(file, NUM_LISTED)
    lines = [f"{row['path']}: {row['reason']}" + (f" ({row['detail']})" if row["detail"] else "") for row in first]
    logger.warning("files that cannot be used, all of them in %s: %s", file, "; ".join(lines))
    cause = f"{error.cause} ('{file}' lists the files that cannot be used)"
    listing = WrongInput(cause, setting=error.setting, way_out=error.way_out)
    for line in lines:
        listing.add_note(markdown_text(line))
    return listing


def prepare_ingest(etl: EtlConfig, storage: Storage, config: SparkConfig) -> Source:
    """Check everything that can be checked before files are read, and list the source.

    Raises:
        WrongInput: As `prepare_source`; or a table cannot be written to, or its path has something else than a table.
    """
    check_writable(storage.home, "storage.home")
    check_writable(storage.tables, "storage.tables")
    for name in ("images", "files"):
        delta.check_table_path(storage.table(name))
    return prepare_source(etl, storage, config)


def ingest_images(etl: EtlConfig, storage: Storage, config: SparkConfig) -> EtlReport:
    """List the source and synchronize the tables `images` and `files` with it, as `ingest_source`.

    Raises:
        WrongInput: As `prepare_ingest` and `ingest_source`.
    """
    with keep_spark():  # the session that lists a URL also reads its files
        return ingest_source(etl, prepare_ingest(etl, storage, config), storage, config)


def ingest_source(etl: EtlConfig, source: Source, storage: Storage, config: SparkConfig) -> EtlReport:
    """Synchronize the tables `images` and `files` with the listed source, under an exclusive lock.

    Spark does not start if the source and both tables are local and the tables are up to date. It does start if there
    are quarantined files with a reason of READ_AGAIN, which every run reads again.

    `images` is committed first, then `files`; if a run is killed in between, the next run completes it. A run without
    changes commits nothing. A file whose size, times, inode, label and predefined split are those of the ledger is not
    read again. If it is, and has the same content, `images` is not committed.

    Raises:
        WrongInput: The settings or columns differ from the tables', there are too many unusable files, too many images
            would leave, or a class has too few images; the tables are unchanged.
        DiskFull: The disk has no space for the tables or Spark's temporary files. The tables are unchanged, or `images`
            is committed and the next run commits `files`.
        TableChanged: Another program wrote to one of the tables during the run; its changes are kept, and the next run
            synchronizes both tables.
    """

    def ingest(spark: SparkSession | None) -> EtlReport:
        nonlocal source  # a second attempt uses the listing of the first
        with write_access(storage.table("images"), spark), translate_disk_full(storage.tables, storage.home):
            while True:
                source = relist_if_outdated(spark, etl, source, storage)
                tables = open_tables(spark, etl, storage, source)
                # On a store, without a lock, another run may have committed between the listing and the opening.
                if newest_commits(storage) == source.before:
                    return _ingest(spark, source, tables, storage, etl)

    return try_without_spark(ingest, config, storage)


def _ingest(
    spark: SparkSession | None, source: Source, tables: Tables, storage: Storage, requested: EtlConfig
) -> EtlReport:
    etl, is_grouped = tables.etl, tables.etl.split_group.by != "none"
    if etl.decode_version != requested.decode_version:
        logger.info(
            "the tables are decoded by version %d, and keep it: give other tables for another", etl.decode_version
        )
    paths = (storage.table("images"), storage.table("files"))
    from_scratch = None in tables.versions or tables.replaced
    if spark is None and from_scratch:
        raise NeedsSpark
    with Relations(storage) as relations:
        compared = Comparison(
            relations,
            source.listing,
            tables.ledger,
            tables.existing,
            replaced=tables.replaced,
            keep_deleted=etl.deleted == "keep",
            rule=SplitRule.of(etl) if etl.split_by == "stratified" or is_grouped else None,
            ignored=source.left.rows(),
            grouping=Grouping(etl, source.groups, tables.hashes) if is_grouped else None,
        )
        if compared.decomposed:
            logger.warning(
                "'%s' keeps the labels %s of an older release, with their models. New tables have labels in Unicode's "
                "composed form (NFC): for them ingest again into %s",
                paths[0], shown(compared.decomposed[:MAX_GROUPS]), properties.OTHER_TABLES,
            )  # fmt: skip
        num_new = compared.num_new()
        up_to_date = not from_scratch and compared.is_up_to_date()
        # The JVM of a killed run may still write. `write_access` waits for it only if this run has a JVM, too.
        if spark is None and not (up_to_date and all(map(is_swept, paths))):
            raise NeedsSpark
        num_files = source.listing.num_rows + source.left.num_ignored
        logger.info("%d files in %s, %d of them new or changed", num_files, source.location, num_new)
        if num_touched := compared.num_touched():
            logger.info(
                "%d of these differ in inode or time of status change alone, as after a remount: nothing follows where "
                "the content is the same",
                num_touched,
            )
        if etl.split_by != requested.split_by:
            # Not an error: forms and deployments write defaults out, so the value need not be a choice of the user.
            logger.info(
                "etl.split_by is %s, but '%s' was made with %s and continues with it, so that no image changes its "
                "split: for another split give %s",
                requested.split_by, paths[0], etl.split_by, properties.OTHER_TABLES,
            )  # fmt: skip
        if spark is not None and not up_to_date:
            counts = _synchronize(spark, source, compared, tables, storage)
        else:
            compared.resolve(READ_ARROW.empty_table())
            counts = _check_gates(compared, etl, storage)
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
        ignored=counts.outcomes[IGNORED],
        left_by_systems=source.left.num_systems,
        outside_sample=source.left.num_outside,
        read=num_new,
        changed=[images.version, files.version] != tables.versions,
        classes=counts.classes,
    )
    logger.info(
        "%s is at version %d: %d files = %d stored + %d duplicates + %d quarantined + %s%s",
        images.path, images.version, counts.outcomes.total() + report.left_by_systems + report.outside_sample,
        report.stored, report.duplicates, report.quarantined, source.left.parts,
        "" if report.changed else "; nothing new, nothing committed",
    )  # fmt: skip
    return report


def _synchronize(
    spark: SparkSession, source: Source, compared: Comparison, tables: Tables, storage: Storage
) -> FileCounts:
    """Read new and changed files, and write both tables; return the numbers of files and images."""
    images_version, files_version = tables.versions
    images, files = storage.table("images"), storage.table("files")
    with staged_parts(images, images_version) as target:
        compared.resolve(_read_new(spark, compared.to_read(), tables.etl, source, target, scratch_root(storage)))
        counts = _check_gates(compared, tables.etl, storage)
        write_images(spark, target, images_version, compared, tables.properties)
    changes = compared.ledger_changes(datetime.now(UTC))
    if files_version is not None and tables.lacking and changes.num_rows:
        delta.add_columns(spark, files, tables.lacking)
        files_version += 1
    with staged_parts(files, files_version) as target:
        write_files(spark, target, files_version, changes, tables.properties)
    return counts
