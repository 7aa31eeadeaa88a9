"""The checks as Prefect tasks: preflight, sanity checks, and the repetition of a training run.

Modules that load torch are imported inside the functions: registering deployments does not wait for torch.
"""

from prefect.artifacts import create_table_artifact

from tasks.checks.original_run import OriginalRun, read_training
from tasks.checks.preflight import check_pipeline, check_split_size
from tasks.config.cache import CacheConfig
from tasks.config.checks import GradientConfig, OverfitConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.orchestration.pools import check_pool, where_to_run
from tasks.orchestration.stage import flow_run_tags, stage
from tasks.refs import CacheRef, GradientReport, OverfitReport, RepeatReport, RunRef, TableRef
from tasks.report.task import publish_run
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables.delta import check_table_path
from tasks.tables.snapshots import at_version
from tasks.text.markup import in_cells
from tasks.tracking.server import check_tracking


@stage("preflight", timeout_seconds=1800)
def check_inputs(config: PipelineConfig, storage: Storage) -> None:
    """Check the input before any work, and log at once if a work pool that trains has no worker."""
    single = where_to_run(config.single) if config.trains_single else None
    distributed = where_to_run(config.distributed) if config.trains_distributed else None
    check_pipeline(
        config, storage, trains_here="in_place" in (single, distributed), ranks_here=distributed == "in_place"
    )
    if single == "work_pool":
        check_pool(config.single, "single", "training")
    if distributed == "work_pool":
        check_pool(config.distributed, "distributed", "distributed training")


@stage("check-training", timeout_seconds=1800)
def check_trainable(
    train: TrainConfig,
    cache_config: CacheConfig,
    tracked: Storage | None = None,
    distributed: DistributedConfig | None = None,
) -> None:
    """Check that the model can be trained, and the tracking server reached, before a cache is built."""
    from tasks.checks.trainable import check_training  # Imported here: it loads torch.

    if tracked is not None:
        check_tracking(tracked)
    check_training(train, cache_config, distributed=distributed)


@stage("check-batches", timeout_seconds=1800)
def check_batches_fit(train: TrainConfig, images: TableRef, distributed: DistributedConfig | None = None) -> None:
    """Check that a table version has enough images for the ranks, before its cache is built."""
    check_split_size(train, distributed.num_ranks if distributed else 1, images)


@stage("overfit-batch", timeout_seconds=3600)
def overfit_one_batch(train: TrainConfig, cache: CacheRef, overfit: OverfitConfig) -> OverfitReport:
    """Overfit one batch, publish its loss curve, and raise an error if the loss does not reach the target."""
    from tasks.checks.sanity import check_overfitted, overfit_batch

    report = overfit_batch(train, cache, overfit)
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(report.losses)]
    create_table_artifact(table=rows, key="overfit-batch", description=f"Loss of one batch of {report.num_images}")
    check_overfitted(report, train, overfit)
    return report


@stage("check-gradients", timeout_seconds=3600)
def check_all_gradients(train: TrainConfig, cache: CacheRef, gradients: GradientConfig) -> GradientReport:
    """Publish the gradient norms of all trained parameters, and raise an error if a gradient is missing."""
    from tasks.checks.sanity import check_gradients, measure_gradients

    report = measure_gradients(train, cache, gradients)
    rows = [in_cells(found.model_dump()) for found in report.parameters]
    create_table_artifact(table=rows, key="gradients", description=f"Gradients over {report.batches} batches")
    check_gradients(report)
    return report


@stage("read-training", timeout_seconds=1800)
def read_original_run(run_id: str | None, storage: Storage) -> OriginalRun:
    """Read settings and data version of a finished MLflow run."""
    # Otherwise an unreachable server would look like a server without the run.
    check_tracking(storage)
    return read_training(run_id, storage)


@stage("choose-trained-images", timeout_seconds=1800)
def choose_trained_images(original: OriginalRun, storage: Storage, spark_config: SparkConfig) -> TableRef:
    """Return the table version that a run was trained on."""
    check_table_path(original.table)
    return try_without_spark(
        lambda session: at_version(session, original.table, original.version), spark_config, storage
    )


@stage("repeat-training", timeout_seconds=None)
def repeat_original_run(original: OriginalRun, cache: CacheRef, storage: Storage) -> RepeatReport:
    """Repeat a training run, and publish a comparison with the original."""
    from tasks.checks.repeat import repeat_training  # Here: it loads torch.

    report = repeat_training(original, cache, storage, flow_run_tags())
    rows = [in_cells(pair.model_dump() | {"agrees": pair.agrees}) for pair in report.metrics]
    weights = "equal" if report.weights_equal else "not equal"
    about = f"MLflow run {report.run_id} repeats {report.repeat_of}; the weights are {weights}"
    create_table_artifact(table=rows, key="repeat-comparison", description="; ".join([about, *report.differences]))
    publish_run(RunRef(run_id=report.run_id), storage, "repeat")
    return report
