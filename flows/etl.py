"""The ETL flow: ingest a folder of class folders into the Delta tables `images` and `files`."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.etl import EtlRun
from tasks.etl.task import ingest
from tasks.orchestration.stage import run_stage
from tasks.refs import EtlReport
from tasks.storage import resolve_storage


@dag_flow("etl")
def etl(config: EtlRun = EtlRun()) -> EtlReport:
    """Update the tables `images` and `files` from the source."""
    return run_stage(ingest, config.etl, resolve_storage(config.storage), config.spark)


if __name__ == "__main__":
    run_from_command_line(etl, EtlRun)
