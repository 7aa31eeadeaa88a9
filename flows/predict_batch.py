"""The batch inference flow: predict the images of a table, or of a folder, with the champion."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.prediction import PredictRun
from tasks.orchestration.stage import run_stage
from tasks.predict.shown import answers_text
from tasks.predict.task import predict_images
from tasks.refs import PredictReport
from tasks.tables.chosen import chosen_tables


@dag_flow("predict-batch")
def predict_batch(config: PredictRun = PredictRun()) -> PredictReport:
    """Predict every image that the champion has not predicted yet."""
    return run_stage(
        predict_images,
        config.predict,
        config.promote,
        chosen_tables(config.storage, config.predict.table),
        config.spark,
    )


if __name__ == "__main__":
    run_from_command_line(predict_batch, PredictRun, answers_text)
