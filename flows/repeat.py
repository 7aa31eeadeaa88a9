"""A training once more: the settings and the table version of an MLflow run, trained again and compared with it."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.config.train import RepeatRun
from tasks.orchestration.task import run_stage
from tasks.refs import RepeatReport
from tasks.repeat.task import choose_trained_images, read_first_training, train_again
from tasks.storage import resolve_storage


@dag_flow("repeat")
def repeat(config: RepeatRun = RepeatRun()) -> RepeatReport:
    """Train again what a run trained, and say whether metrics and weights are the same."""
    storage = resolve_storage(config.storage)
    first = run_stage(read_first_training, config.run_id, storage)
    images = run_stage(choose_trained_images, first, storage, config.spark)
    cache = run_stage(materialize, first.cache, images, storage, config.spark)
    return run_stage(train_again, first, cache, storage)


if __name__ == "__main__":
    run_from_command_line(repeat, RepeatRun)
