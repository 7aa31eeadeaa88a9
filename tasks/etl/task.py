"""The ETL stage as a Prefect task."""

from prefect.artifacts import create_table_artifact

from tasks.config import EtlConfig, SparkConfig
from tasks.etl.delta import at_version, check_table_path
from tasks.etl.ingest import ingest_images
from tasks.orchestration.task import skipped, stage
from tasks.refs import EtlReport, TableRef
from tasks.schema import SPLITS
from tasks.spark import spark_session
from tasks.storage import Storage


@stage("etl")
def ingest(etl: EtlConfig, storage: Storage, spark: SparkConfig) -> EtlReport:
    """Bring the tables `images` and `files` in line with the source."""
    report = ingest_images(etl, storage, spark)
    table = [
        {"class": label, **{split: counts.get(split, 0) for split in SPLITS}}
        for label, counts in report.classes.items()
    ]
    create_table_artifact(
        table=table,
        key="data-set",
        description=f"{report.stored} pictures by class and split, {report.quarantined} files quarantined "
        f"(`{report.images.path}` version {report.images.version})",
    )
    return report if report.changed else skipped(report, "no new, changed or deleted files")


@stage("choose-images", timeout_seconds=1800)
def choose_images(version: int | None, storage: Storage, spark: SparkConfig) -> TableRef:
    """Return the asked-for version of the table `images`, or the latest, resolved once for all that follows."""
    path = storage.table("images")
    check_table_path(path)
    with spark_session(spark, storage) as session:
        return at_version(session, path, version)
