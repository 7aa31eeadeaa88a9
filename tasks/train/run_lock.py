"""The lock of a training run: of two processes with the same run, one trains, and the other finds it finished."""

import logging

import filelock

from tasks.errors import TimeLimitExceeded
from tasks.progress.activity import waiting_for_process
from tasks.train.spec import TrainingSpec
from tasks.train.sweep import training_lock

logger = logging.getLogger("lakevision.train")

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
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process has this training run ('%s' is locked): waiting until it ends", path)
    else:
        return lock
    # After a loss, a lost rank has it, and not a process that trains.
    seconds = LOST_RANK_SECONDS if spec.restart else -1.0
    try:
        with waiting_for_process("waiting for another process with the same training run"):
            lock.acquire(timeout=seconds)
    except filelock.Timeout:
        where = f" ({', '.join(spec.lost_hosts)})" if spec.lost_hosts else ""
        raise TimeLimitExceeded(
            f"another process still has this training run after {seconds:.0f} s ('{path}' is locked), probably a rank "
            f"of a lost host that hangs{where}: end it there, then run again to resume from the last checkpoint"
        ) from None
    return lock
