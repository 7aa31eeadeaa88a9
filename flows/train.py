"""The training flow, in one process: builds the cache if it is missing."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import check_batches_fit, check_trainable
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainRun
from tasks.etl.task import choose_images
from tasks.launch.task import settle_weights, train_single
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage, resolve_storage


def prepare_cache(
    config: TrainRun, storage: Storage, distributed: DistributedConfig | None = None, *, is_tracked: bool = True
) -> CacheRef:
    """Check the settings, and return the cache of a version of `images`, which is built if it is missing."""
    start = settle_weights(config.train, storage, config.spark)
    run_stage(check_trainable, start, config.cache, storage if is_tracked else None, distributed)
    images = run_stage(choose_images, config.table_version, storage, config.spark)
    run_stage(check_batches_fit, config.train, images, distributed)
    return run_stage(materialize, config.cache, images, storage, config.spark)


@dag_flow("train")
def train(config: TrainRun = TrainRun()) -> RunRef:
    """Train a model on a version of `images`."""
    storage = resolve_storage(config.storage)
    cache = prepare_cache(config, storage)
    start = settle_weights(config.train, storage, config.spark, cache=cache)
    return run_stage(train_single, start, cache, storage)


if __name__ == "__main__":
    run_from_command_line(train, TrainRun)
