"""The service flow: answer images over HTTP with the champion, until the run is cancelled."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.serving import ServeRun
from tasks.orchestration.stage import run_stage
from tasks.refs import ServeReport
from tasks.serve.task import serve_model
from tasks.tables.chosen import chosen_tables


@dag_flow("serve")
def serve(config: ServeRun = ServeRun()) -> ServeReport:
    """Answer images over HTTP with the champion, until the run is cancelled."""
    return run_stage(serve_model, config, chosen_tables(config.storage))


if __name__ == "__main__":
    run_from_command_line(serve, ServeRun)
