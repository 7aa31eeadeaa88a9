"""Failures of ranks, as their launcher raises them."""


class RankFailed(RuntimeError):
    """A rank failed, and the others were terminated.

    Attributes:
        was_retried: Whether the ranks were started again after each loss, as often as allowed (`is_retried`).
    """

    was_retried: bool = False


class RanksLost(RankFailed):
    """Ranks were ended by a signal, or their host does not answer; the others were terminated.

    Attributes:
        num_gone: Number of ranks that cannot start again, since their host is gone.
        hosts: Names of these hosts.
    """

    def __init__(self, message: str, num_gone: int = 0, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.num_gone = num_gone
        self.hosts = hosts


class Stopped(RuntimeError):
    """The training run was stopped by its caller; run again to resume from the last checkpoint."""
