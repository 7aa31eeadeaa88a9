"""The promotion flow: make the best of the given MLflow runs the champion if it beats the current one."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.promotion import PromoteRun
from tasks.orchestration.task import run_stage
from tasks.refs import ModelRef, RunRef
from tasks.registry.task import promote_run
from tasks.storage import resolve_storage


@dag_flow("promote")
def promote(config: PromoteRun = PromoteRun()) -> ModelRef:
    """Promote the best run if it beats the current champion, and return the champion."""
    runs = [RunRef(run_id=run_id) for run_id in config.run_ids]
    return run_stage(promote_run, runs, config.promote, resolve_storage(config.storage))


if __name__ == "__main__":
    run_from_command_line(promote, PromoteRun)
