"""The flow that finds suspected labels: images that the features of all others assign to another class."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from flows.train import prepare_cache
from tasks.config.pipeline import LabelErrorsRun
from tasks.labels.task import suspect
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import LabelErrorReport
from tasks.storage import resolve_storage


@dag_flow("find-label-errors")
def find_label_errors(config: LabelErrorsRun = LabelErrorsRun()) -> LabelErrorReport:
    """Rank the labels of a version of `images` by how much the other images speak against them."""
    storage = resolve_storage(config.storage)
    cache = prepare_cache(config, storage, is_tracked=False)
    start = settle_weights(config.train, storage, config.spark, cache=cache)
    return run_stage(suspect, start, cache, storage, config.spark)


if __name__ == "__main__":
    run_from_command_line(find_label_errors, LabelErrorsRun)
