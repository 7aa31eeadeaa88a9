"""The live test: whether the challenger is better than the champion in service, by labels where the two differ."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.serving import LiveTestRun
from tasks.orchestration.stage import run_stage
from tasks.refs import LiveReport
from tasks.serve.task import compare_answers
from tasks.tables.chosen import chosen_tables


@dag_flow("compare-live")
def compare_live(config: LiveTestRun = LiveTestRun()) -> LiveReport:
    """Compare the challenger with the champion in service, and make it the champion if it is better."""
    return run_stage(compare_answers, config.live, config.promote, chosen_tables(config.storage), config.spark)


if __name__ == "__main__":
    run_from_command_line(compare_live, LiveTestRun, lambda report, _config: report.line)
