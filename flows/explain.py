"""The explanation flow: which places of an image speak for its class, as heat maps."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.serving import ExplainRun
from tasks.explain.task import explain_named
from tasks.orchestration.stage import run_stage
from tasks.refs import ExplainReport
from tasks.tables.chosen import chosen_tables


@dag_flow("explain")
def explain(config: ExplainRun = ExplainRun()) -> ExplainReport:
    """Write the heat maps of images to a folder."""
    return run_stage(explain_named, config.explain, config.promote, chosen_tables(config.storage), config.spark)


if __name__ == "__main__":
    run_from_command_line(explain, ExplainRun)
