"""The promotion flow: make the best of the given MLflow runs the champion if it beats the current one."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.prediction import PromoteRun
from tasks.orchestration.approval import asked_before, check_can_ask
from tasks.orchestration.stage import run_stage
from tasks.refs import ModelRef, RunRef
from tasks.registry.approval import ask_user
from tasks.registry.decision import Promotion
from tasks.registry.task import compare_run, promote_run
from tasks.tables.chosen import chosen_tables


@dag_flow("promote")
def promote(config: PromoteRun = PromoteRun()) -> ModelRef:
    """Promote the best run if it beats the current champion, and return the champion."""
    runs, storage = [RunRef(run_id=run_id) for run_id in config.run_ids], chosen_tables(config.storage)
    approval = None
    if config.promote.approval == "human":
        check_can_ask()
        asked = asked_before()
        if asked is None:
            decision = run_stage(compare_run, runs, config.promote, storage, config.spark, config.predict)
        else:
            decision = Promotion.model_validate(asked)
        if decision.outcome != "waiting":
            return decision.champion
        runs = [decision.challenger]
        approval = ask_user(decision, config.promote)
    settings = config.promote, storage, config.spark
    return run_stage(promote_run, runs, *settings, approval=approval, predict=config.predict, reason=config.reason)


if __name__ == "__main__":
    run_from_command_line(promote, PromoteRun)
