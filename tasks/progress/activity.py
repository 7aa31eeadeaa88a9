"""The activity of this process: phase of work, epoch and step, which a rank reports to its launcher.

Uses only the standard library. The main thread replaces a tuple, without a system call; a thread of the rank sends it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

Kind = Literal["start", "work", "step", "ranks", "processes"]
"""start: imports its modules. work: takes unknown time, as compiling does. step: one of many of about the same time.
ranks: waits for other ranks in a collective operation. processes: waits for another process with the same work."""


class Activity(NamedTuple):
    """Activity at one moment."""

    name: str
    """Phase of the work, such as training."""
    kind: Kind
    epoch: int | None = None
    """Epoch of this step, or of the last one before this activity."""
    step: int | None = None
    changes: int = 0
    """Number of changes so far; it stays the same without progress."""

    @property
    def place(self) -> str:
        """Step, epoch and phase for a sentence."""
        if self.step is None:
            return f"'{self.name}'"
        return f"step {self.step}{'' if self.epoch is None else f' of epoch {self.epoch}'} ({self.name})"


class _State:
    current = Activity("starting", "start")
    slow_steps = False


def current() -> Activity:
    """Return the activity of the main thread."""
    return _State.current


def _change(name: str, kind: Kind, epoch: int | None, step: int | None) -> None:
    # Of the main thread only: on rank 0, another thread sends heartbeats while the main thread logs results.
    if threading.get_ident() == threading.main_thread().ident:
        _State.current = Activity(name, kind, epoch, step, _State.current.changes + 1)


@contextmanager
def _within(name: str, kind: Kind, step: int | None = None) -> Iterator[None]:
    before = _State.current
    _change(name, kind, before.epoch, step)
    try:
        yield
    finally:
        _change(before.name, before.kind, _State.current.epoch, before.step)


def working(name: str) -> AbstractContextManager[None]:
    """Report work that takes unknown time within the context, such as writing a checkpoint."""
    return _within(name, "work")


def waiting_for_ranks() -> AbstractContextManager[None]:
    """Report within the context that this rank waits for the others in a collective operation."""
    return _within(_State.current.name, "ranks", _State.current.step)


def waiting_for_process(name: str) -> AbstractContextManager[None]:
    """Report within the context that this process waits for another one, which does the same work."""
    return _within(name, "processes")


@contextmanager
def stepping(name: str, epoch: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports the beginning of a step by its number, from 0."""

    def begin_step(step: int) -> None:
        _change(name, "work" if _State.slow_steps else "step", _State.current.epoch if epoch is None else epoch, step)

    with _within(name, "work"):
        yield begin_step


def progressed() -> None:
    """Report progress within a step, such as another row group that was read for its batch."""
    name, kind, epoch, step, _changes = _State.current
    _change(name, kind, epoch, step)


def expect_slow_steps(*, slow: bool) -> None:
    """Set whether steps take unknown time: those of the first epoch do, if the network is compiled in them."""
    _State.slow_steps = slow
