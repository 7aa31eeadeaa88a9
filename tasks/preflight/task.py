"""The preflight as a Prefect task."""

from prefect.logging import get_run_logger

from tasks.config import CacheConfig, PipelineConfig, TrainConfig
from tasks.distributed.task import check_deployment, live_workers, where_to_train, worker_command
from tasks.orchestration.task import stage
from tasks.preflight.check import check_pipeline, check_training
from tasks.storage import Storage


@stage("preflight", timeout_seconds=1800)
def check_inputs(config: PipelineConfig, storage: Storage) -> None:
    """Refuse what cannot be before any work, and say at once when the work pool has no worker."""
    check_pipeline(config, storage)
    if where_to_train(config.distributed) == "in_place":
        return
    check_deployment(config.distributed)
    pool = config.distributed.work_pool
    if not live_workers(pool):
        # Said now, refused only when the training is submitted and still none came: a worker may start meanwhile.
        get_run_logger().warning(
            "no worker polls the work pool '%s': start one with '%s' before distributed training begins",
            pool,
            worker_command(pool),
        )


@stage("check-training", timeout_seconds=1800)
def check_trainable(train: TrainConfig, cache: CacheConfig) -> None:
    """Refuse what cannot be trained before a cache is built for it."""
    check_training(train, cache)
