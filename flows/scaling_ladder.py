"""The scaling ladder: from a sample on one device to all images on several machines, and what each step gains."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.manifest import open_cache
from tasks.cache.sweep import discard
from tasks.cache.task import materialize
from tasks.checks.task import check_trainable
from tasks.config.pipeline import LadderRun
from tasks.etl.task import ingest
from tasks.ladder.steps import Ladder, StepResult, measure, plan_steps
from tasks.ladder.task import compare_steps
from tasks.launch.task import settle_weights, submit_train_distributed, train_single
from tasks.orchestration.stage import run_stage
from tasks.refs import TRAIN
from tasks.spark.session import keep_spark, release_memory_for_training
from tasks.storage import resolve_storage
from tasks.system.cores import gpus_for, num_cores


@dag_flow("scaling-ladder")
def scaling_ladder(config: LadderRun = LadderRun()) -> Ladder:
    """Train on a sample, on all images, with ranks here and elsewhere, and compare the steps."""
    storage = resolve_storage(config.storage)
    of_sample = resolve_storage(
        storage.as_config().model_copy(update={"tables": f"{storage.tables.rstrip('/')}-sample"})
    )
    part = config.etl.model_copy(update={"sample_fraction": config.etl.sample_fraction * config.ladder.sample_fraction})
    results: list[StepResult] = []
    with keep_spark():
        start = settle_weights(config.train, storage, config.spark)
        run_stage(check_trainable, start, config.cache)
        caches = {
            is_sample: run_stage(
                materialize, config.cache, run_stage(ingest, etl, where, config.spark).images, where, config.spark
            )
            for is_sample, etl, where in ((True, part, of_sample), (False, config.etl, storage))
        }
        release_memory_for_training(config.spark)
        before = None
        for number, step in enumerate(plan_steps(config, start, len(gpus_for(start.device)), num_cores()), 1):
            if step.left_out:
                results.append(StepResult(name=step.name, left_out=step.left_out))
                continue
            cache, where = caches[step.on_sample], of_sample if step.on_sample else storage
            # Its own features: those that an earlier step has computed would make it look faster.
            where = where.model_copy(update={"cache": f"{where.cache}/step-{number}"})
            if step.distributed is None:
                run = run_stage(train_single, step.train, cache, where)
            else:
                run = run_stage(submit_train_distributed, step.train, step.distributed, cache, where, config.spark)
            discard(where.cache)
            rows = open_cache(cache).splits[TRAIN].rows
            before = measure(step, run, where, rows, before, config.ladder.cost_per_hour)
            results.append(before)
    return run_stage(compare_steps, results)


if __name__ == "__main__":
    run_from_command_line(scaling_ladder, LadderRun, lambda ladder, _config: ladder.table)
