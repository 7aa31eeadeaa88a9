"""Prefect tasks that train in one process, on a work pool, or as ranks.

Training runs outside the flow's process, so that the flow's heartbeats continue. Functions that need MLflow import it:
the process that starts ranks does so only while they run, so that they start seconds earlier.
"""

from collections.abc import Sequence
from typing import Any

from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from tasks.config.distributed import DistributedConfig, TrainDistributedRun
from tasks.config.recipe import total_epochs
from tasks.config.storage import SparkConfig
from tasks.config.submitted import SingleConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import TrialRun
from tasks.errors import WrongInput
from tasks.launch.launcher import launch_ranks
from tasks.model.pretrained import names_model
from tasks.orchestration.pool_settings import PoolSettings
from tasks.orchestration.pools import where_to_run
from tasks.orchestration.stage import flow_run_tags, run_stage, skipped, stage
from tasks.orchestration.submission import submit
from tasks.progress.count import EpochProgress
from tasks.refs import CacheRef, RunRef
from tasks.report.task import publish_run
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec, run_keys


def settle_weights(
    train: TrainConfig,
    storage: Storage,
    spark: SparkConfig,
    model_name: str | None = None,
    cache: CacheRef | None = None,
) -> TrainConfig:
    """Return settings whose weights are not those of the champion or a run, but the file of its model.

    Args:
        train: Settings of the training run.
        storage: Its storage.
        spark: Its Spark session, for tables that only Spark can read.
        model_name: Registered model of the champion; None: that of the table `images`.
        cache: Its cache, if it is built.
    """
    return run_stage(choose_weights, train, storage, spark, model_name, cache) if names_model(train.weights) else train


@stage("initial-weights", timeout_seconds=3600)
def choose_weights(
    train: TrainConfig, storage: Storage, spark: SparkConfig, model_name: str | None, cache: CacheRef | None
) -> TrainConfig:
    """Fetch the model from which the training run starts, once for all ranks."""
    from tasks.launch.initial_weights import fetch_initial_weights  # Here: it loads Spark and MLflow.

    return fetch_initial_weights(train, storage, spark, model_name, cache)


def train_with_artifacts(spec: TrainingSpec, key: str) -> RunRef:
    """Train in separate processes; publish the progress of the epochs and the metrics at the end."""
    epochs = EpochProgress(key, total_epochs(spec.train))
    run = launch_ranks(spec, epochs.update)
    epochs.end()
    publish_run(run, spec.storage, key)
    return run


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    """Return a cache key if the finished MLflow run exists, else None."""
    from tasks.tracking.runs import find_finished_run
    from tasks.tracking.server import is_available

    if not is_available(parameters["storage"]):
        return None  # The stage itself waits for the server, and logs it.
    keys = run_keys(parameters["train"], parameters["cache"], parameters.get("distributed"))
    found = find_finished_run(parameters["storage"], *keys)
    return None if found is None else f"train-{found.run_id}"


@stage("train", timeout_seconds=None, cache_key=_key)
def train_single(
    train: TrainConfig, cache: CacheRef, storage: Storage, single: SingleConfig = SingleConfig()
) -> RunRef:
    """Train in one process, here or on the work pool, unless the same run is already finished."""
    from tasks.tracking.runs import find_finished_run
    from tasks.tracking.trained import mark_chosen

    spec = TrainingSpec(train=train, cache=cache, storage=storage, tags=flow_run_tags())
    if found := find_finished_run(storage, *spec.keys):
        mark_chosen(storage, found)
        publish_run(found, storage, "train")
        return skipped(found, f"MLflow run {found.run_id} has already completed this training run")
    if where_to_run(single) == "in_place":
        return train_with_artifacts(spec, "train")
    parameters = {
        # The flow of trials trains in one process; without a study it is a training run of its own.
        "config": TrialRun(storage=storage.as_config(), train=train).model_dump(),
        "cache_ref": cache.model_dump(),
    }
    run = train_on_pool(single, "single", parameters, storage, spec.keys)
    publish_run(run, storage, "train")
    return run


def train_on_pool(
    settings: PoolSettings,
    group: str,
    parameters: dict[str, Any],
    storage: Storage,
    keys: Sequence[str],
    *,
    name: str | None = None,
    gpus: int | None = None,
) -> RunRef:
    """Submit a training run, wait for it, and return its MLflow run.

    Args:
        settings: As `submit`.
        group: As `submit`.
        parameters: As `submit`.
        storage: Storage of the training run, with its tracking server.
        keys: Keys by which the training run is found.
        name: As `submit`.
        gpus: As `submit`.

    Raises:
        TimeLimitExceeded: As `submit`.
        UserError: As `SubmittedRun.poll`.
        WrongInput: As `submit`; or the MLflow run is not on the tracking server of `storage`, since the worker uses
            another one.
    """
    from tasks.tracking.runs import find_finished_run

    def is_trained() -> bool:
        return find_finished_run(storage, *keys) is not None

    submitted = submit(settings, group, "training", parameters, name=name, gpus=gpus, has_result=is_trained)
    submitted.wait()
    finished = find_finished_run(storage, *keys)
    if finished is None:
        raise WrongInput(
            f"the submitted run '{submitted.name}' completed, but '{storage.tracking_shown}' has no finished run "
            f"{' or '.join(keys)}",
            setting="storage.tracking",
            way_out="the worker must use the same storage.tracking",
        )
    return finished


@stage("train-distributed", timeout_seconds=None, cache_key=_key)
def submit_train_distributed(
    train: TrainConfig,
    distributed: DistributedConfig,
    cache: CacheRef,
    storage: Storage,
    spark: SparkConfig = SparkConfig(),
) -> RunRef:
    """Submit the distributed training run to the work pool and wait; without a Prefect server, train in place."""
    from tasks.tracking.runs import find_finished_run

    spec = _distributed_spec(train, distributed, cache, storage, spark)
    if found := find_finished_run(storage, *spec.keys):
        publish_run(found, storage, "train-distributed")
        return skipped(found, f"MLflow run {found.run_id} has already completed this training run")
    if where_to_run(distributed) == "in_place":
        get_run_logger().info("no Prefect server is configured: %d ranks train in place", distributed.num_ranks)
        return train_with_artifacts(spec, "train-distributed")
    parameters = {
        "config": TrainDistributedRun(
            storage=storage.as_config(), spark=spark, train=train, distributed=distributed
        ).model_dump(),
        "cache_ref": cache.model_dump(),
    }
    # Ranks of other launchers are elsewhere than the submitted run.
    takes_gpus = distributed.launcher == "local" and train.device != "cpu"
    gpus = distributed.num_ranks if takes_gpus else None
    return train_on_pool(distributed, "distributed", parameters, storage, spec.keys, gpus=gpus)


@stage("train-ranks", timeout_seconds=None)
def train_ranks(
    train: TrainConfig,
    distributed: DistributedConfig,
    cache: CacheRef,
    storage: Storage,
    spark: SparkConfig = SparkConfig(),
) -> RunRef:
    """Launch the ranks from this machine, a worker of the GPU pool."""
    return train_with_artifacts(_distributed_spec(train, distributed, cache, storage, spark), "train-distributed")


def _distributed_spec(
    train: TrainConfig, distributed: DistributedConfig, cache: CacheRef, storage: Storage, spark: SparkConfig
) -> TrainingSpec:
    return TrainingSpec(
        train=train,
        distributed=distributed,
        spark=spark if distributed.launcher == "spark" else None,
        cache=cache,
        storage=storage,
        tags=flow_run_tags(),
    )
