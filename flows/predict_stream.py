"""The streaming inference flow: predict the images that were added to a table or folder since the last run."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.prediction import StreamRun
from tasks.orchestration.stage import run_stage
from tasks.predict.shown import answers_text
from tasks.refs import StreamReport
from tasks.stream.task import predict_changes
from tasks.tables.chosen import chosen_tables


@dag_flow("predict-stream")
def predict_stream(config: StreamRun = StreamRun()) -> StreamReport:
    """Predict the images that were added to a table or folder since the last run."""
    storage = chosen_tables(config.storage, config.predict.table)
    return run_stage(predict_changes, config.stream, config.predict, config.promote, storage, config.spark)


if __name__ == "__main__":
    run_from_command_line(predict_stream, StreamRun, answers_text)
