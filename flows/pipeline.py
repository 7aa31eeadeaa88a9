"""The whole DAG: etl, cache, verdict, train in one process, with ranks on the GPU pool, or both, promote, predict."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import check_batches_fit, check_inputs
from tasks.config.pipeline import PipelineConfig
from tasks.etl.task import ingest
from tasks.launch.task import settle_weights, submit_train_distributed, train_single
from tasks.orchestration.stage import StageLog, run_stage
from tasks.predict.task import predict_images
from tasks.registry.task import check_promotable, promote_run
from tasks.spark.session import keep_spark, release_memory_for_training
from tasks.storage import resolve_storage
from tasks.summary.summary import PipelineSummary
from tasks.summary.task import summarize
from tasks.verdict.task import give_verdict


@dag_flow("pipeline")
def pipeline(config: PipelineConfig = PipelineConfig()) -> PipelineSummary:
    """Turn a folder of images into a champion and its predictions."""
    storage = resolve_storage(config.storage)
    stages = StageLog()
    with keep_spark():  # one JVM for all stages that need one
        stages.run(check_inputs, config, storage)
        etl = stages.run(ingest, config.etl, storage, config.spark)
        run_stage(check_batches_fit, config.train, etl.images, config.ranks)
        cache = stages.run(materialize, config.cache, etl.images, storage, config.spark)
        run_stage(check_promotable, config.promote, storage, etl.images, cache)
        start = settle_weights(config.train, storage, config.spark, config.promote.model_name, cache)
        release_memory_for_training(config.spark)
        own = config.single if config.trains_single else None
        verdict = stages.run(give_verdict, start, cache, storage, own, config.ranks)
        single = distributed = None
        if config.trains_single:
            single = stages.run(train_single, start, cache, storage, config.single)
        if config.trains_distributed:
            distributed = stages.run(submit_train_distributed, start, config.distributed, cache, storage, config.spark)
        champion = stages.run(
            promote_run,
            [run for run in (single, distributed) if run is not None],
            config.promote,
            storage,
            config.spark,
            etl.images,
            ask_in=config.storage,
            predict=config.predict,
        )
        table = None if config.predict.table or config.predict.source else etl.images
        predictions = stages.run(predict_images, config.predict, config.promote, storage, config.spark, table, champion)
    trained = (single, distributed)
    return summarize(storage, etl, cache, verdict, *trained, champion, predictions, stages.seconds, stages.skipped)


if __name__ == "__main__":
    run_from_command_line(pipeline, PipelineConfig)
