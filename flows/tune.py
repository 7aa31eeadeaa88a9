"""The hyper-parameter search: trials on the GPU pool or in this process, then a training run with the best."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.config.tune import TuneRun
from tasks.etl.task import choose_images
from tasks.launch.task import settle_weights, train_single
from tasks.orchestration.stage import run_stage
from tasks.refs import RunRef
from tasks.storage import resolve_storage
from tasks.tune.task import check_drawn_batches_fit, check_searchable, search_best, submit_best


@dag_flow("tune")
def tune(config: TuneRun = TuneRun()) -> RunRef:
    """Find the settings with the best `train.monitor`, and train a model with them to the end."""
    storage = resolve_storage(config.storage)
    start = settle_weights(config.train, storage, config.spark)
    run_stage(check_searchable, config.model_copy(update={"train": start}), storage)
    images = run_stage(choose_images, config.table_version, storage, config.spark)
    run_stage(check_drawn_batches_fit, config, images)
    cache = run_stage(materialize, config.cache, images, storage, config.spark)
    start = settle_weights(config.train, storage, config.spark, cache=cache)
    best = run_stage(search_best, start, config.tune, cache, storage)
    run_stage(submit_best, best, config.tune, cache, storage)
    return run_stage(train_single, best, cache, storage)


if __name__ == "__main__":
    run_from_command_line(tune, TuneRun)
