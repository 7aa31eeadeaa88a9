"""The maintenance flow: compact the Delta tables, and remove files that no retained version needs."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.maintenance import MaintainRun
from tasks.maintenance.task import maintain as maintain_tables
from tasks.orchestration.stage import run_stage
from tasks.refs import MaintenanceReport
from tasks.tables.chosen import chosen_tables


@dag_flow("maintain")
def maintain(config: MaintainRun = MaintainRun()) -> MaintenanceReport:
    """Compact and vacuum the tables, but keep every version that a registered model was trained on."""
    return run_stage(maintain_tables, config.maintain, chosen_tables(config.storage), config.spark)


if __name__ == "__main__":
    run_from_command_line(maintain, MaintainRun)
