"""Promotion alone: the best of given MLflow runs becomes the champion, where it is better than that."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.promotion import PromoteRun
from tasks.orchestration.task import run_stage
from tasks.refs import ModelRef, RunRef
from tasks.registry.task import promote_run
from tasks.storage import resolve_storage


@dag_flow("promote")
def promote(config: PromoteRun = PromoteRun()) -> ModelRef:
    """Make the best run the champion where it is better than that, and return the champion."""
    runs = [RunRef(run_id=run_id) for run_id in config.run_ids]
    return run_stage(promote_run, runs, config.promote, resolve_storage(config.storage))


if __name__ == "__main__":
    run_from_command_line(promote, PromoteRun)
