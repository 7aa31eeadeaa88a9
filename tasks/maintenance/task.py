"""The maintenance of the Delta tables as a Prefect task."""

from prefect.artifacts import create_table_artifact

from tasks.config.maintenance import MaintainConfig
from tasks.config.storage import SparkConfig
from tasks.maintenance.maintain import maintain_tables
from tasks.orchestration.stage import stage
from tasks.refs import MaintenanceReport
from tasks.storage import Storage
from tasks.text.markup import in_cells


@stage("maintain", timeout_in="config")
def maintain(config: MaintainConfig, storage: Storage, spark_config: SparkConfig) -> MaintenanceReport:
    """Compact the tables and remove files that no kept version needs."""
    report = maintain_tables(config, storage, spark_config)
    rows = [in_cells(done.model_dump(exclude={"table"}) | {"table": done.table.path}) for done in report.tables]
    create_table_artifact(table=rows, key="maintenance", description="Files compacted and deleted, by table")
    return report
