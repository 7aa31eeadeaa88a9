"""The reproducibility check: train again with an MLflow run's settings and table version, and compare."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import choose_trained_images, read_original_run, repeat_original_run
from tasks.config.checks import RepeatRun
from tasks.orchestration.stage import run_stage
from tasks.refs import RepeatReport
from tasks.storage import resolve_storage


@dag_flow("repeat")
def repeat(config: RepeatRun = RepeatRun()) -> RepeatReport:
    """Train again with the settings and data of a run, and report whether metrics and weights are equal."""
    storage = resolve_storage(config.storage)
    original = run_stage(read_original_run, config.run_id, storage)
    images = run_stage(choose_trained_images, original, storage, config.spark)
    cache = run_stage(materialize, original.cache_config, images, storage, config.spark)
    return run_stage(repeat_original_run, original, cache, storage)


if __name__ == "__main__":
    run_from_command_line(repeat, RepeatRun)
