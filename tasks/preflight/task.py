"""The preflight as a Prefect task."""

from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.train import TrainConfig
from tasks.orchestration.task import stage
from tasks.pool.task import check_pool, where_to_run
from tasks.preflight.check import check_pipeline, check_split_size
from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.server import check_tracking


@stage("preflight", timeout_seconds=1800)
def check_inputs(config: PipelineConfig, storage: Storage) -> None:
    """Check the input before any work, and log at once if a work pool that trains has no worker."""
    single = where_to_run(config.single) if config.trains_single else None
    distributed = where_to_run(config.distributed) if config.trains_distributed else None
    check_pipeline(config, storage, trains_here="in_place" in (single, distributed))
    if single == "work_pool":
        check_pool(config.single, "single", "training")
    if distributed == "work_pool":
        check_pool(config.distributed, "distributed", "distributed training")


@stage("check-training", timeout_seconds=1800)
def check_trainable(train: TrainConfig, cache_config: CacheConfig, tracked: Storage | None = None) -> None:
    """Check that the model can be trained, and the tracking server reached, before a cache is built."""
    from tasks.preflight.trainable import check_training  # Imported here: it loads torch.

    if tracked is not None:
        check_tracking(tracked)
    check_training(train, cache_config)


@stage("check-batches", timeout_seconds=1800)
def check_batches_fit(train: TrainConfig, images: TableRef, distributed: DistributedConfig | None = None) -> None:
    """Check that a table version has enough images for the ranks and the batch size, before its cache is built."""
    check_split_size(train, distributed.num_ranks if distributed else 1, images)
