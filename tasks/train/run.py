"""A training run on one rank, from a cache to a finished MLflow run."""

from collections.abc import Callable
from contextlib import ExitStack

from pydantic import TypeAdapter

from tasks import tracking
from tasks.collectives import Reducer, SingleProcess
from tasks.refs import RunRef
from tasks.train.checkpoint_copies import send_newest_checkpoint
from tasks.train.continuation import adopt_checkpoint, continued_run
from tasks.train.out_of_memory import translate_out_of_memory
from tasks.train.progress import ReportedEpoch, ResumePoint
from tasks.train.rank_zero import run_on_rank_zero
from tasks.train.run_lock import lock_training
from tasks.train.spec import TrainingSpec
from tasks.train.sweep import sweep_checkpoints
from tasks.train.training import Training

RESUME_POINT = TypeAdapter(ResumePoint)


def train_model(
    spec: TrainingSpec, reducer: Reducer | None = None, on_epoch: Callable[[ReportedEpoch], None] | None = None
) -> RunRef:
    """Train, evaluate the best weights on the split `test`, and log the results to MLflow.

    A run that was killed resumes from its last checkpoint when it is started again with the same specification, in
    the same MLflow run. A finished run is not repeated, and one of fewer epochs may be continued in a new MLflow run
    (`tasks.train.continuation`).

    Args:
        spec: Settings and data of the training run.
        reducer: The other ranks; None for a single process.
        on_epoch: Called on rank 0 after each epoch.

    Raises:
        WrongInput: Weights, model or device are invalid or not available.
        CacheDamaged: Files of the cache are missing or changed.
        DiskFull: The disk of the cache has too little space for the features of a frozen backbone.
        OutOfMemory: The memory of this process or of its GPU is used up.
        TimeLimitExceeded: A rank that was lost before this start still has the training run.
        TrackingUnavailable: The tracking server does not answer; the training state is in the checkpoint.
        KeyboardInterrupt: The process was interrupted; the checkpoint is written.
    """
    reducer = reducer or SingleProcess()
    training = Training(spec, reducer, on_epoch)
    with translate_out_of_memory(spec.train, reducer.rank), ExitStack() as stack:
        if not spec.shares_home:
            if training.writes:
                adopt_checkpoint(spec)
            send_newest_checkpoint(training.checkpoints, reducer, writes=training.writes)

        def begin() -> ResumePoint:
            training.folder.mkdir(parents=True, exist_ok=True)
            stack.callback(lock_training(spec).release)
            sweep_checkpoints(spec.storage.checkpoints, spec.train.keep_checkpoint_days)
            if spec.shares_home:
                adopt_checkpoint(spec)
            with tracking.translate_outage(spec.storage):
                return _find_resume_point(training, spec)

        run = training.run(run_on_rank_zero(reducer, RESUME_POINT, begin))
        if training.writes and reducer.rank != 0:  # As rank 0 does for its host.
            training.end_checkpoints()
            sweep_checkpoints(spec.storage.checkpoints, spec.train.keep_checkpoint_days)
        return run


def _find_resume_point(training: Training, spec: TrainingSpec) -> ResumePoint:
    """Return the state that earlier processes left of the training run; the caller holds its lock."""
    storage, key = spec.storage, spec.key
    finished = tracking.find_finished_run(storage, *spec.keys)
    if finished is not None:
        training.end_checkpoints()  # The process that finished it may have been killed before.
        return ResumePoint(finished=finished)
    name, resume = training.checkpoints.newest()
    if name is not None and continued_run(spec, training.checkpoints.peek(name)) is not None:
        resume = None  # The run of fewer epochs stays as it is.
    if resume is None or not tracking.has_run(storage, resume):
        # Killed before its first checkpoint; or the MLflow run was deleted, and training resumes in another one.
        resume = tracking.find_unfinished_run(storage, key)
    for own in spec.keys:
        tracking.end_abandoned_runs(storage, own, keep=resume)
    return ResumePoint(checkpoint=name, resume=resume)
