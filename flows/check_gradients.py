"""The gradient check: verify within seconds that every part of the model learns."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import check_all_gradients, check_trainable
from tasks.config.checks import GradientRun
from tasks.etl.task import choose_images
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import GradientReport
from tasks.storage import resolve_storage


@dag_flow("check-gradients")
def check_gradients(config: GradientRun = GradientRun()) -> GradientReport:
    """Check the gradient of every trained parameter on the first batches of a version of `images`."""
    storage = resolve_storage(config.storage)
    start = settle_weights(config.train, storage, config.spark)
    run_stage(check_trainable, start, config.cache)
    images = run_stage(choose_images, config.table_version, storage, config.spark)
    cache = run_stage(materialize, config.cache, images, storage, config.spark)
    return run_stage(check_all_gradients, start, cache, config.gradients)


if __name__ == "__main__":
    run_from_command_line(check_gradients, GradientRun)
