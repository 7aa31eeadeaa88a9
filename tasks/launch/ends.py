"""The end of ranks: its cause, the MLflow run of a rank that was killed, and ranks that outlive their kill."""

import logging
import sys
import threading
import time
from collections.abc import Mapping

import filelock

from tasks.errors import loggable
from tasks.launch.failures import LOSSES, RankFailed, RanksLost
from tasks.launch.protocol import EXIT_ENDED
from tasks.launch.rank_process import RankProcess, first_failed
from tasks.train.checkpoint_files import training_lock
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

FAILED_SECONDS = 1.0
"""Seconds between the first failure of a rank and the end of all, in which its cause may show in another rank."""

TRACKING_SECONDS, LEAST_TRACKING_SECONDS = 10.0, 2.0
"""Seconds after the ranks were told to end until which the state of their MLflow run is set, and the least for it.

The tracking server may not answer. Ranks that had to be killed have taken 8 s, and this process takes a few to exit on
a busy machine. All processes of a cancelled run are to have ended after 15 s.
"""


def check_left(left: Mapping[int, int]) -> None:
    """Check that ranks may start again after the loss that is being handled, if it is one.

    Args:
        left: Process ids of ranks that outlive SIGKILL, by rank: they hold the training run's lock and their GPUs.

    Raises:
        RankFailed: There are some. It is not retried.
    """
    loss = sys.exception()
    if not left or not isinstance(loss, LOSSES):
        return
    named = ", ".join(f"{rank} (process {process})" for rank, process in left.items())
    failure = RankFailed(
        f"rank {named} was killed and does not end, so no rank is started again (a driver or a disk does not answer: "
        f"see `dmesg`); run again once it has ended. Before it: {loggable(loss)}"
    )
    failure.was_retried = True
    raise failure from loss


def check_ends(ranks: list[RankProcess], *, wait: bool = True) -> None:
    """Check that no rank has failed; with `wait`, a first failure waits for those of other ranks.

    Raises:
        UserError: The error that a rank reported.
        HostLost: The host of a rank is lost.
        RanksLost: A rank was ended by a signal from outside.
        RankFailed: A rank failed for another reason.
    """
    failed = first_failed(ranks)
    if failed is None:
        return
    first = min(rank.ended_at for rank in ranks if rank.ended_at is not None and rank.process.returncode != 0)
    if wait and (time.monotonic() - first < FAILED_SECONDS or not failed.has_ended()):
        return
    if failed.failure is not None:
        raise failed.failure
    status = failed.process.returncode
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    # Ranks that are told to end write a checkpoint together first; this process has told none so far.
    is_lost = status < 0 or status == EXIT_ENDED
    kind = RanksLost if is_lost else RankFailed
    raise kind(f"rank {failed.number} {how}; its last lines:\n" + "\n".join(failed.lines))


def end_killed_run(spec: TrainingSpec, told_at: float) -> None:
    """Set the state of the MLflow run that killed ranks left as running; the caller holds the launch lock.

    An outage of the tracking server neither delays the end nor hides its cause: the next start of the training run
    sets the state.

    Args:
        spec: The training run.
        told_at: When the ranks were told to end, on the monotonic clock.
    """

    def end() -> None:
        from tasks import tracking

        lock = filelock.FileLock(training_lock(spec.storage.checkpoints / spec.key))
        try:
            with lock.acquire(timeout=0):
                tracking.end_abandoned_runs(spec.storage, spec.key, keep=None)
        except filelock.Timeout:
            logger.info(
                "the MLflow run stays as it is: another process, or a rank that does not end, holds the training run"
            )
        except Exception as error:
            logger.warning("the MLflow run is left as running: %s", loggable(error))

    thread = threading.Thread(target=end, name="end-killed-run", daemon=True)
    thread.start()
    thread.join(max(LEAST_TRACKING_SECONDS, told_at + TRACKING_SECONDS - time.monotonic()))
    if thread.is_alive():
        logger.warning("the MLflow run is left as running: '%s' does not answer", spec.storage.tracking_shown)
