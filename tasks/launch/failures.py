"""Failures of ranks, as their launcher raises them."""

from tasks.errors import HostLost, RankStalled


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
