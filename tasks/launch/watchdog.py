"""The launcher's watchdog, which finds ranks that are stopped, in an endless loop, or wait for each other forever."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from tasks.errors import join_names
from tasks.progress.activity import Activity

START_SECONDS = 300.0
"""Minimum limit for the start of a rank: an import may hold Python's lock while it reads gigabytes from a cold disk."""

WORK_SECONDS = 3600.0
"""Minimum limit for work that takes unknown time: compiling, loading weights, writing a checkpoint, logging a model."""

COLLECTIVE_SECONDS = 60.0
"""Minimum limit for a collective operation that all ranks have begun: the first one on GPUs sets up NCCL."""

PAUSE_SECONDS = 5.0
"""Interval between two checks from which on this process itself was stopped, and perhaps its ranks with it."""

WAITING = ("ranks", "processes")
"""Kinds of activity without a limit of their own, since another rank or process is the cause of the wait."""


@dataclass(frozen=True)
class Stall:
    """Ranks that do not continue, and the sentence about them."""

    ranks: tuple[int, ...]
    sentence: str


@dataclass
class _Watched:
    heard_at: float
    progressed_at: float
    activity: Activity


class Watchdog:
    """The latest activity of each rank, and the decision which rank has stalled.

    A rank has stalled if it reports nothing, or reports the same step, for the time limit. A rank that waits in a
    collective operation is not blamed, but the rank for which it waits.
    """

    def __init__(self, num_ranks: int, stall_seconds: float, now: float | None = None) -> None:
        """Start the limits.

        Args:
            num_ranks: Number of ranks.
            stall_seconds: Limit in seconds, `train.stall_timeout_seconds`.
            now: Time of the start, by the monotonic clock.
        """
        now = time.monotonic() if now is None else now
        self._stall_seconds = stall_seconds
        self._checked_at = now
        self._ranks = {rank: _Watched(now, now, Activity("starting", "start")) for rank in range(num_ranks)}

    def on_activity(self, rank: int, activity: Activity, now: float | None = None) -> None:
        """Note the activity of a rank; called by the thread that reads its events."""
        watched = self._ranks.get(rank)
        if watched is None:
            return
        watched.heard_at = time.monotonic() if now is None else now
        if activity != watched.activity:
            watched.progressed_at = watched.heard_at
            watched.activity = activity

    def ended(self, rank: int) -> None:
        """Watch a rank no longer, whose process has ended."""
        self._ranks.pop(rank, None)

    def find_stall(self, now: float | None = None) -> Stall | None:
        """Return the stalled ranks, or None."""
        now = time.monotonic() if now is None else now
        paused, self._checked_at = now - self._checked_at, now
        if paused > PAUSE_SECONDS:
            for watched in self._ranks.values():
                watched.heard_at += paused
                watched.progressed_at += paused
        silent = [rank for rank, each in self._ranks.items() if now - each.heard_at > self._silence_limit(each)]
        stuck = [rank for rank, each in self._ranks.items() if now - each.progressed_at > self._work_limit(each)]
        if stuck and not silent:
            # A rank that became silent only just after the last progress of another one is the cause of both.
            silent = [rank for rank, each in self._ranks.items() if now - each.heard_at > self._silence_limit(each) / 2]
        if silent:
            return self._stall(silent, now, "has reported nothing", "since")
        if stuck:
            return self._stall(self._furthest_behind(stuck), now, "has made no progress", "in")
        if self._ranks and all(each.activity.kind == "ranks" for each in self._ranks.values()):
            last = max(each.progressed_at for each in self._ranks.values())
            if now - last > max(self._stall_seconds, COLLECTIVE_SECONDS):
                return self._stall(self._furthest_behind(self._ranks), now, "has waited for other ranks", "in")
        return None

    def _silence_limit(self, watched: _Watched) -> float:
        return max(self._stall_seconds, START_SECONDS if watched.activity.kind == "start" else 0.0)

    def _work_limit(self, watched: _Watched) -> float:
        kind = watched.activity.kind
        if kind in WAITING:
            return inf
        return self._stall_seconds if kind == "step" else max(self._stall_seconds, WORK_SECONDS)

    def _furthest_behind(self, ranks: Iterable[int]) -> list[int]:
        def progress(rank: int) -> tuple[int, int]:
            activity = self._ranks[rank].activity
            return -1 if activity.epoch is None else activity.epoch, -1 if activity.step is None else activity.step

        least = min(map(progress, ranks))
        return [rank for rank in ranks if progress(rank) == least]

    def _stall(self, ranks: list[int], now: float, what: str, where: str) -> Stall:
        told = []
        for rank in ranks:
            watched = self._ranks[rank]
            seconds = now - (watched.heard_at if where == "since" else watched.progressed_at)
            told.append(f"rank {rank} {what} for {seconds:.0f} s, {where} {watched.activity.place}")
        return Stall(tuple(ranks), join_names(told[:3], len(told)))
