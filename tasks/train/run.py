"""A training run on one rank, from a cache to a finished MLflow run: lock, start, and the error of used-up memory."""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import filelock
from pydantic import TypeAdapter

from tasks.collectives.reducer import Reducer, run_on_rank_zero
from tasks.config.train import TrainConfig
from tasks.errors import OutOfMemory, TimeLimitExceeded
from tasks.model_package.serving import is_out_of_memory
from tasks.progress.activity import waiting_for_process
from tasks.refs import RunRef
from tasks.train.checkpoint import send_newest_checkpoint
from tasks.train.checkpoint_files import sweep_checkpoints, training_lock
from tasks.train.continuation import adopt_checkpoint, end_checkpoints
from tasks.train.progress import ResumePoint
from tasks.train.spec import TrainingSpec
from tasks.train.training import OnEpoch, Training

logger = logging.getLogger("lakevision.train")

RESUME_POINT = TypeAdapter(ResumePoint)


def train_model(spec: TrainingSpec, reducer: Reducer | None = None, on_epoch: OnEpoch | None = None) -> RunRef:
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
    reducer = reducer or Reducer()
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
            # Here: only rank 0 loads MLflow, tables and figures.
            from tasks.train.results import find_resume_point

            return find_resume_point(spec, training.checkpoints)

        run = training.run(run_on_rank_zero(reducer, RESUME_POINT, begin))
        if training.writes and reducer.rank != 0:  # As rank 0 does for its host.
            end_checkpoints(spec)
            sweep_checkpoints(spec.storage.checkpoints, spec.train.keep_checkpoint_days)
        return run


LOST_RANK_SECONDS = 120.0
"""Time limit for a lost rank to release its lock.

Its agent ends it when nothing was heard of the launcher for 30 s. An NFS server of Linux releases the locks of a
machine that is silent for 90 s (nfsv4leasetime). A rank has the lock for longer if its agent hangs as well.
"""


def lock_training(spec: TrainingSpec) -> filelock.BaseFileLock:
    """Lock a training run, and wait while another process has the lock.

    Launchers have a lock of their own. This one is for direct calls, and for a rank that outlives its launcher or was
    lost with its host.

    Args:
        spec: The training run, whose folder exists.

    Returns:
        The lock, acquired once, to be released once.

    Raises:
        TimeLimitExceeded: The ranks were started again after a loss, and the other process does not release it.
    """
    path = training_lock(spec.storage.checkpoints / spec.key)
    lock = filelock.FileLock(path)
    with suppress(filelock.Timeout):
        lock.acquire(timeout=0)
        return lock
    logger.info("another process has this training run ('%s' is locked): waiting until it ends", path)
    # After a loss, a lost rank has it, and not a process that trains.
    seconds = LOST_RANK_SECONDS if spec.restart else -1.0
    try:
        with waiting_for_process("waiting for another process with the same training run"):
            lock.acquire(timeout=seconds)
    except filelock.Timeout:
        where = f" ({', '.join(spec.lost_hosts)})" if spec.lost_hosts else ""
        raise TimeLimitExceeded(
            f"another process still has this training run after {seconds:.0f} s ('{path}' is locked), probably a rank "
            f"of a lost host that hangs{where}",
            way_out="end it there, then run again to resume from the last checkpoint",
        ) from None
    return lock


_SIZE = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def out_of_memory(error: BaseException, train: TrainConfig, rank: int) -> OutOfMemory:
    """Return the error for users.

    Args:
        error: The error of torch, of a library or of Python.
        train: Settings of the training.
        rank: The rank in which it occurred.
    """
    size = _SIZE.search(str(error))
    asked = f" when it asked for {size[1]}" if size else ""
    advice = (
        "use a smaller train.model or cache.image_size"
        if train.batch_size == 1
        else f"lower train.batch_size, which is {train.batch_size}"
        + (", or set it to auto" if train.batch_size != "auto" else "")
        + "; a higher train.accumulate_steps keeps the images per step"
    )
    setting = "train.model" if train.batch_size == 1 else "train.batch_size"
    return OutOfMemory(f"rank {rank} ran out of memory{asked}", setting=setting, way_out=advice)


@contextmanager
def translate_out_of_memory(train: TrainConfig, rank: int) -> Iterator[None]:
    """Raise `OutOfMemory` in place of an error within the block that means that memory is used up.

    Raises:
        OutOfMemory: As `out_of_memory`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, train, rank) from error
