"""One training run, from a cache to a finished MLflow run: what every rank does, whether there is one or many."""

from collections.abc import Callable

import filelock

from tasks import tracking
from tasks.config import DistributedConfig, TrainConfig
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.train.checkpoint import remove_checkpoints
from tasks.train.progress import EpochMetrics
from tasks.train.reduce import Reducer, SingleProcess
from tasks.train.training import Training, run_key

__all__ = ["run_key", "train_model"]


def train_model(
    train: TrainConfig,
    cache: CacheRef,
    storage: Storage,
    distributed: DistributedConfig | None = None,
    reducer: Reducer | None = None,
    tags: dict[str, str] | None = None,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    repetition: str | None = None,
) -> RunRef:
    """Train, evaluate the best weights on the split `test`, and log it all to MLflow.

    A run killed on the way goes on from its last checkpoint when it is started again with the same inputs, in the same
    MLflow run. A finished one is not repeated.

    Args:
        train: Settings of the training.
        cache: The cache to train from.
        storage: Where checkpoints and tracking lie.
        distributed: Settings of the ranks, where there are many.
        reducer: The other ranks; None for a single process.
        tags: Tags of the MLflow run.
        on_epoch: Called on rank 0 after each epoch.
        repetition: Names a repetition, which is trained although the same was trained before.

    Raises:
        WrongInput: Weights, model or device that cannot be.
        CacheDamaged: The cache is not what it was.
        KeyboardInterrupt: The process was asked to leave; the checkpoint is written.
    """
    reducer = reducer or SingleProcess()
    training = Training(train, cache, storage, distributed, reducer, tags or {}, on_epoch, repetition)
    if reducer.rank != 0:
        return training.run(None)
    training.folder.mkdir(parents=True, exist_ok=True)
    # Two that want the same training: one trains, the other waits and finds it done. Launchers queue before they start
    # ranks; this lock is for plain calls, and for a rank that outlives its launcher.
    with filelock.FileLock(f"{training.folder}.lock"):
        finished = tracking.find_finished_run(storage, training.key)
        if finished is not None:
            remove_checkpoints(training.folder)  # It may have been killed before it did so itself.
        checkpoint = None if finished else training.checkpoints.load()
        if finished is None:
            # Somebody may have deleted the run, or the database: then the training goes on in a new one.
            if checkpoint and not tracking.has_run(storage, checkpoint["run_id"]):
                checkpoint["run_id"] = None
            tracking.end_abandoned_runs(storage, training.key, keep=checkpoint["run_id"] if checkpoint else None)
        return training.run((finished, checkpoint))
