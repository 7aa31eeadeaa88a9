"""The overfitting check: verify within seconds that the model can overfit one batch."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from flows.train import prepare_cache
from tasks.checks.task import overfit_one_batch
from tasks.config.checks import OverfitRun
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import OverfitReport
from tasks.storage import resolve_storage


@dag_flow("overfit-batch")
def overfit_batch(config: OverfitRun = OverfitRun()) -> OverfitReport:
    """Overfit one batch of a version of `images`: train until its loss has fallen far enough."""
    storage = resolve_storage(config.storage)
    cache = prepare_cache(config, storage, is_tracked=False)
    start = settle_weights(config.train, storage, config.spark, cache=cache)
    return run_stage(overfit_one_batch, start, cache, config.overfit)


if __name__ == "__main__":
    run_from_command_line(overfit_batch, OverfitRun)
