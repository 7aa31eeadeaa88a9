"""Distributed training as Prefect tasks: submit it to the GPU pool, or run its ranks right here."""

from typing import Any

from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from tasks import tracking
from tasks.config import DistributedConfig, TrainConfig, TrainDistributedRun
from tasks.distributed.spec import RankSpec
from tasks.orchestration.task import flow_run_tags, skipped, stage
from tasks.pool.task import SubmittedRun, submit, where_to_run
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.train.identity import run_key
from tasks.train.task import existing_run_key, publish_run, train_with_artifacts


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    return existing_run_key(parameters["train"], parameters["cache"], parameters["storage"], parameters["distributed"])


def trained_on_pool(submitted: SubmittedRun, storage: Storage, key: str) -> RunRef:
    """Return the MLflow run of a submitted training that has completed.

    Raises:
        RuntimeError: It is not where we look: the worker tracks elsewhere.
    """
    finished = tracking.find_finished_run(storage, key)
    if finished is None:
        raise RuntimeError(
            f"the submitted training '{submitted.name}' completed, but '{storage.tracking_shown}' has no finished run "
            f"{key}: the worker must use the same storage.tracking"
        )
    return finished


@stage("train-distributed", timeout_seconds=None, cache_key=_key)
def submit_train_distributed(
    train: TrainConfig, distributed: DistributedConfig, cache: CacheRef, storage: Storage
) -> RunRef:
    """Submit the distributed training to the work pool and wait for it; without a server, train in place."""
    key = run_key(train, cache, distributed)
    if found := tracking.find_finished_run(storage, key):
        publish_run(found, storage, "train-distributed")
        return skipped(found, f"MLflow run {found.run_id} has trained this already")
    if where_to_run(distributed) == "in_place":
        get_run_logger().info("no Prefect server is configured: %d ranks train in place", distributed.num_ranks)
        spec = RankSpec(train=train, distributed=distributed, cache=cache, storage=storage, tags=flow_run_tags())
        return train_with_artifacts(spec, "train-distributed")
    parameters = {
        "config": TrainDistributedRun(storage=storage.as_config(), train=train, distributed=distributed).model_dump(),
        "cache_ref": cache.model_dump(),
    }
    submitted = submit(distributed, "distributed", "training", parameters)
    submitted.wait()
    return trained_on_pool(submitted, storage, key)


@stage("train-ranks", timeout_seconds=None)
def train_ranks(train: TrainConfig, distributed: DistributedConfig, cache: CacheRef, storage: Storage) -> RunRef:
    """Run the ranks on this machine: what the worker of the GPU pool does."""
    spec = RankSpec(train=train, distributed=distributed, cache=cache, storage=storage, tags=flow_run_tags())
    return train_with_artifacts(spec, "train-distributed")
