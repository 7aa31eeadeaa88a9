"""The distributed training flow: its ranks run on the machine of the flow run, or on hosts that it reaches."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.distributed import TrainDistributedRun
from tasks.launch.task import settle_weights, train_ranks
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef, RunRef
from tasks.storage import resolve_storage


@dag_flow("train-distributed")
def train_distributed(config: TrainDistributedRun = TrainDistributedRun(), cache_ref: CacheRef | None = None) -> RunRef:
    """Train a model with several ranks on `cache_ref`, or on the cache of a version of `images`."""
    storage = resolve_storage(config.storage)
    if cache_ref is None:  # else the flow that submits this one has checked its input
        from flows.train import prepare_cache  # Here: it loads Spark, which training on a given cache does not need.

        cache_ref = prepare_cache(config, storage, config.distributed)
    start = settle_weights(config.train, storage, config.spark, cache=cache_ref)
    return run_stage(train_ranks, start, config.distributed, cache_ref, storage, config.spark)


if __name__ == "__main__":
    run_from_command_line(train_distributed, TrainDistributedRun)
