"""ETL alone: from a folder of class folders to the Delta tables `images` and `files`."""

from prefect import flow

from flows.command_line import run_from_command_line
from tasks.config import EtlRun
from tasks.etl.task import ingest
from tasks.orchestration.task import run_stage
from tasks.refs import EtlReport
from tasks.storage import resolve_storage


@flow(name="etl", persist_result=True, result_serializer="json")
def etl(config: EtlRun = EtlRun()) -> EtlReport:
    """Bring the tables in line with the source."""
    return run_stage(ingest, config.etl, resolve_storage(config.storage), config.spark)


if __name__ == "__main__":
    run_from_command_line(etl, EtlRun)
