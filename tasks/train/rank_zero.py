"""Work on rank 0 that may take long, while the other ranks wait."""

import threading
from collections.abc import Callable
from typing import TypeVar

from pydantic import TypeAdapter

from tasks.broadcast import FLAG, broadcast_value
from tasks.collectives import Reducer

T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of rank 0, without which Horovod warns that it is missing."""


def run_on_rank_zero(reducer: Reducer, kind: TypeAdapter[T], work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank; all ranks call this.

    An exception in `work` ends rank 0, and the launcher then ends the other ranks.

    Args:
        reducer: The ranks.
        kind: Type of the result.
        work: The work; it has no collective operation.
    """
    if reducer.rank != 0:
        return wait_for_rank_zero(reducer, kind)
    if reducer.num_ranks == 1:
        return work()
    finished = threading.Event()

    def send_heartbeats() -> None:
        while not finished.wait(HEARTBEAT_SECONDS):
            broadcast_value(reducer, FLAG, False)

    heartbeats = threading.Thread(target=send_heartbeats, name="rank-0-heartbeat")
    heartbeats.start()
    try:
        result = work()
    finally:
        finished.set()
        heartbeats.join()
    broadcast_value(reducer, FLAG, True)
    return broadcast_value(reducer, kind, result)


def wait_for_rank_zero(reducer: Reducer, kind: TypeAdapter[T]) -> T:
    """Return the result of rank 0's work, on another rank."""
    while not broadcast_value(reducer, FLAG, None):
        continue  # A heartbeat.
    return broadcast_value(reducer, kind, None)
