"""The ETL stage as a Prefect task."""

from prefect.artifacts import create_table_artifact

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_source, prepare_ingest
from tasks.etl.validate import DataChecks, validate_tables
from tasks.orchestration.stage import flow_run_tags, skipped, stage
from tasks.refs import SPLITS, EtlReport, TableRef
from tasks.spark.session import keep_spark, try_without_spark
from tasks.storage import Storage
from tasks.tables.delta import check_table_path
from tasks.tables.snapshots import at_version
from tasks.text.markup import in_cells
from tasks.tracking.server import check_tracking


@stage("etl", timeout_in="etl")
def ingest(etl: EtlConfig, storage: Storage, spark_config: SparkConfig) -> EtlReport:
    """Synchronize the tables `images` and `files` with the source, and publish their contents as artifacts."""
    with keep_spark():  # the session that lists a URL also reads its files
        source = prepare_ingest(etl, storage, spark_config)
        check_tracking(storage, data=True)
        report = ingest_source(etl, source, storage, spark_config)
        checks = validate_tables(report, etl, storage, spark_config, flow_run_tags())
    publish_tables(report, checks)
    return report if report.changed else skipped(report, "no new, changed or deleted files")


def publish_tables(report: EtlReport, checks: DataChecks) -> None:
    """Publish class counts, data validation, near-duplicates and quarantined files as artifacts of the Prefect run."""
    version = f"`{report.images.path}` version {report.images.version}"
    counts = [
        in_cells({"class": label, **{split: counts.get(split, 0) for split in SPLITS}})
        for label, counts in report.classes.items()
    ]
    about = f"{report.stored} images by class and split, {report.quarantined} files quarantined ({version})"
    create_table_artifact(table=counts, key="data-set", description=about)
    create_table_artifact(
        table=[in_cells(row) for row in checks.rows()], key="data-validation", description=f"Contents of {version}"
    )
    if checks.nearest:
        create_table_artifact(
            table=[in_cells(pair.model_dump()) for pair in checks.nearest],
            key="near-duplicates",
            description=f"The closest of {checks.near_duplicates} pairs in different splits ({version})",
        )
    if checks.quarantined:
        create_table_artifact(
            table=[in_cells(file.model_dump()) for file in checks.quarantined],
            key="quarantined",
            description=f"The first of {report.quarantined} quarantined files; all are in `{report.files.path}`",
        )


@stage("choose-images", timeout_seconds=1800)
def choose_images(version: int | None, storage: Storage, spark_config: SparkConfig) -> TableRef:
    """Return the requested version of the table `images`, or the latest, resolved once for all later stages."""
    path = storage.table("images")
    check_table_path(path)
    return try_without_spark(lambda session: at_version(session, path, version), spark_config, storage)
