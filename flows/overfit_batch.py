"""The overfitting check: verify within seconds that the model can overfit one batch."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import check_trainable, overfit_one_batch
from tasks.config.checks import OverfitRun
from tasks.etl.task import choose_images
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import OverfitReport
from tasks.storage import resolve_storage


@dag_flow("overfit-batch")
def overfit_batch(config: OverfitRun = OverfitRun()) -> OverfitReport:
    """Overfit one batch of a version of `images`: train until its loss has fallen far enough."""
    storage = resolve_storage(config.storage)
    start = settle_weights(config.train, storage, config.spark)
    run_stage(check_trainable, start, config.cache)
    images = run_stage(choose_images, config.table_version, storage, config.spark)
    cache = run_stage(materialize, config.cache, images, storage, config.spark)
    return run_stage(overfit_one_batch, start, cache, config.overfit)


if __name__ == "__main__":
    run_from_command_line(overfit_batch, OverfitRun)
