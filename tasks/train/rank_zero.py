"""Work on rank 0 that may take long, while the other ranks wait."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tasks.collectives import Reducer

T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of rank 0, without which Horovod warns that it is missing."""


def run_on_rank_zero(reducer: Reducer, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank; all ranks call this.

    An exception in `work` ends rank 0, and the launcher then ends the other ranks.
    """
    if reducer.rank != 0:
        return wait_for_rank_zero(reducer)  # type: ignore[no-any-return]  # broadcast values have any type
    if reducer.num_ranks == 1:
        return work()
    finished = threading.Event()

    def send_heartbeats() -> None:
        while not finished.wait(HEARTBEAT_SECONDS):
            reducer.broadcast((False, None))

    heartbeats = threading.Thread(target=send_heartbeats, name="rank-0-heartbeat")
    heartbeats.start()
    try:
        result = work()
    finally:
        finished.set()
        heartbeats.join()
    reducer.broadcast((True, result))
    return result


def wait_for_rank_zero(reducer: Reducer) -> Any:
    """Return the result of rank 0's work, on another rank."""
    while True:
        is_done, result = reducer.broadcast(None)
        if is_done:
            return result
