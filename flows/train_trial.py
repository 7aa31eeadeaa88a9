"""The flow of one hyper-parameter trial, which a worker of the GPU pool runs."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.config.tune import TrialRun
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef, TrialReport
from tasks.storage import resolve_storage
from tasks.tune.task import train_trial_here


@dag_flow("train-trial")
def train_trial(config: TrialRun = TrialRun(), cache_ref: CacheRef | None = None) -> TrialReport:
    """Train on `cache_ref`, or on the cache of a version of `images`, and report the result to the study."""
    storage = resolve_storage(config.storage)
    if cache_ref is None:
        from flows.train import prepare_cache  # Here: it loads Spark, which training on a given cache does not need.

        cache_ref = prepare_cache(config, storage)
    start = settle_weights(config.train, storage, config.spark, cache=cache_ref)
    return run_stage(train_trial_here, config.model_copy(update={"train": start}), cache_ref, storage)


if __name__ == "__main__":
    run_from_command_line(train_trial, TrialRun)
