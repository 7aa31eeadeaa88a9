"""Failures of ranks, and restarts from the last checkpoint, in the same MLflow run, with fewer ranks if need be."""

import logging
import threading
import time
from collections.abc import Callable

from tasks.config.distributed import parse_hosts
from tasks.errors import HostLost, RankStalled, TimeLimitExceeded
from tasks.refs import RunRef
from tasks.train.checkpoint_files import newest_position
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

FIRST_DELAY_SECONDS = 1.0
"""Delay of the first restart; each further one waits twice as long, since what ended the ranks may last."""

MAX_DELAY_SECONDS = 60.0


class RankFailed(RuntimeError):
    """A rank failed, and the others were terminated.

    Attributes:
        was_retried: Whether the ranks were started again after each loss, as often as allowed (`is_retried`).
    """

    was_retried: bool = False


class RanksLost(RankFailed):
    """A rank was ended by a signal, and the others were terminated; all may start again (`HostLost`: fewer may)."""


LOSSES = (RanksLost, RankStalled, HostLost)
"""Failures after which ranks may start again."""


class Stopped(RuntimeError):
    """The training run was stopped by its caller; run again to resume from the last checkpoint."""


class Deadline:
    """The time limit of a training run, for all its attempts together."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the time.

        Args:
            seconds: The time limit, `train.timeout_seconds`.
            clock: Returns the time in seconds.
        """
        self._seconds = seconds
        self._clock = clock
        self._at = clock() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit, at least 0."""
        return max(0.0, self._at - self._clock())

    def check(self) -> None:
        """Check that time is left.

        Raises:
            TimeLimitExceeded: None is left.
        """
        if self._clock() > self._at:
            raise TimeLimitExceeded(
                f"training took longer than train.timeout_seconds {self._seconds} and was stopped",
                setting="train.timeout_seconds",
                way_out="run again to resume from the last checkpoint",
            )


def train_with_restarts(
    spec: TrainingSpec,
    attempt: Callable[[TrainingSpec], RunRef],
    deadline: Deadline,
    stop: threading.Event | None = None,
) -> RunRef:
    """Train, and start the ranks again after a loss, at most `distributed.max_restarts` times.

    Ranks that were killed or stalled start again, as many as before. Those of a lost host start on the other hosts, as
    many as fit there; if that is fewer than `distributed.min_ranks`, on the same hosts, since it may come back. Other
    errors are raised: they would occur again, or belong to the caller.

    Args:
        spec: Specification of the training run.
        attempt: Starts the ranks of a specification, and returns their MLflow run.
        deadline: The time limit of all attempts together.
        stop: Ends the wait for a restart.

    Raises:
        RanksLost, RankStalled, HostLost: No restart is left.
        TimeLimitExceeded: The time limit ended the wait for a restart.
        Stopped: `stop` was set.
        Exception: As `attempt`.
    """
    settings = spec.distributed
    max_restarts = settings.max_restarts if settings else 0
    delay, restart = FIRST_DELAY_SECONDS, 0
    while True:
        try:
            return attempt(spec)
        except LOSSES as loss:
            restart += 1
            if restart > max_restarts:
                loss.was_retried = max_restarts > 0
                raise
            left = without_lost(spec, loss) if isinstance(loss, HostLost) else spec
            _log_restart(left, loss, restart, max_restarts)
        # Outside the handler: an error of the next attempt has nothing to do with this loss.
        if (stop or threading.Event()).wait(min(delay, deadline.seconds_left)):
            raise Stopped("training was stopped: run again to resume from the last checkpoint")
        deadline.check()
        delay = min(2 * delay, MAX_DELAY_SECONDS)
        from tasks.tracking.runs import RESTARTS_TAG  # Here: it loads MLflow.

        tags = spec.tags | {RESTARTS_TAG: str(restart)}
        spec = left.model_copy(update={"restart": restart, "tags": tags})


def without_lost(spec: TrainingSpec, loss: HostLost) -> TrainingSpec:
    """Return the specification for the ranks that fit on the other hosts, or `spec` if they are too few."""
    settings = spec.distributed
    assert settings is not None, "a single process runs on this machine"
    lost_hosts = (*spec.lost_hosts, loss.host)
    if settings.launcher == "hosts":
        num_left = min(spec.num_ranks, sum(slots for _, slots in parse_hosts(settings.hosts, lost_hosts)))
    else:
        num_left = spec.num_ranks - len(loss.ranks)
    if num_left < (settings.min_ranks or settings.num_ranks):
        return spec
    return spec.model_copy(update={"ranks_left": num_left, "lost_hosts": lost_hosts})


def _log_restart(spec: TrainingSpec, loss: Exception, restart: int, max_restarts: int) -> None:
    if not spec.shares_home:
        start = "the newest checkpoint of the hosts"
    else:
        position = newest_position(spec.storage.checkpoints / spec.key)
        start = "the start" if position is None else "the checkpoint at epoch {}, image {}".format(*position)
    cause, ranks = str(loss).partition("\n")[0].partition(";")[0], "ranks" if spec.num_ranks > 1 else "rank"
    count = f"(restart {restart} of {max_restarts})"
    logger.warning("%s: restarting %d %s from %s %s", cause, spec.num_ranks, ranks, start, count)
