"""The gradient check: verify within seconds that every part of the model learns."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from flows.train import prepare_cache
from tasks.checks.task import check_all_gradients
from tasks.config.checks import GradientRun
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import GradientReport
from tasks.storage import resolve_storage


@dag_flow("check-gradients")
def check_gradients(config: GradientRun = GradientRun()) -> GradientReport:
    """Check the gradient of every trained parameter on the first batches of a version of `images`."""
    storage = resolve_storage(config.storage)
    cache = prepare_cache(config, storage, is_tracked=False)
    start = settle_weights(config.train, storage, config.spark, cache=cache)
    return run_stage(check_all_gradients, start, cache, config.gradients)


if __name__ == "__main__":
    run_from_command_line(check_gradients, GradientRun)
