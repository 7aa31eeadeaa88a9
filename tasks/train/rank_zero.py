"""What rank 0 does while the others wait for it, for longer than Horovod waits for a rank."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tasks.collectives import Reducer

T = TypeVar("T")

TELL_SECONDS = 5.0
"""Between two messages that rank 0 is still busy; Horovod ends ranks that wait for another for minutes."""


def run_on_rank_zero(reducer: Reducer, work: Callable[[], T]) -> T:
    """Do something on rank 0, and return what it gave on every rank; all of them call this.

    What it raises ends rank 0, and the launcher the others.
    """
    if reducer.rank != 0:
        return wait_for_rank_zero(reducer)  # type: ignore[no-any-return]
    if reducer.num_ranks == 1:
        return work()
    finished = threading.Event()

    def tell() -> None:
        while not finished.wait(TELL_SECONDS):
            reducer.broadcast((False, None))

    teller = threading.Thread(target=tell, name="rank-0-is-busy")
    teller.start()
    try:
        value = work()
    finally:
        finished.set()
        teller.join()
    reducer.broadcast((True, value))
    return value


def wait_for_rank_zero(reducer: Reducer) -> Any:
    """Return what rank 0's work gave, on a rank that has none of its own to hand over."""
    while True:
        is_done, value = reducer.broadcast(None)
        if is_done:
            return value
