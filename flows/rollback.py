"""The rollback flow: make the previous champion the champion again."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.promotion import RollbackRun
from tasks.orchestration.stage import run_stage
from tasks.refs import ModelRef
from tasks.registry.task import roll_back_champion
from tasks.tables.chosen import chosen_tables


@dag_flow("rollback")
def rollback(config: RollbackRun = RollbackRun()) -> ModelRef:
    """Make the previous champion the champion again, and return it."""
    return run_stage(roll_back_champion, config.rollback, chosen_tables(config.storage), config.spark)


if __name__ == "__main__":
    run_from_command_line(rollback, RollbackRun)
