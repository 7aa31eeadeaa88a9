"""The training flow, in one process: builds the cache if it is missing."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import check_batches_fit, check_trainable
from tasks.config.train import TrainRun
from tasks.etl.task import choose_images
from tasks.launch.task import train_single
from tasks.orchestration.stage import run_stage
from tasks.refs import RunRef
from tasks.storage import resolve_storage


@dag_flow("train")
def train(config: TrainRun = TrainRun()) -> RunRef:
    """Train a model on a version of `images`."""
    storage = resolve_storage(config.storage)
    run_stage(check_trainable, config.train, config.cache, storage)
    images = run_stage(choose_images, config.table_version, storage, config.spark)
    run_stage(check_batches_fit, config.train, images)
    cache = run_stage(materialize, config.cache, images, storage, config.spark)
    return run_stage(train_single, config.train, cache, storage)


if __name__ == "__main__":
    run_from_command_line(train, TrainRun)
