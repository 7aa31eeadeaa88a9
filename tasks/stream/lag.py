"""The lag of a stream: versions of its table, or files, that it has not processed, and the age of the oldest."""

import time
from dataclasses import dataclass

from tasks.stream.checkpoint import Position
from tasks.tables.delta import Commit, commits_after


@dataclass(frozen=True)
class Lag:
    """The part of a table, or of a folder or URL, that a stream has not processed yet.

    Attributes:
        versions: Number of versions of a table that change rows.
        seconds: Age of the oldest of them, or of the file that was changed first, in seconds.
        files: Number of files of a folder or URL.
    """

    versions: int
    seconds: float
    files: int = 0


def measure_lag(path: str, position: Position) -> Lag:
    """Return the lag of a stream that reads the change data feed of a table, without Spark.

    Args:
        path: Path or URL of the table.
        position: Position of the stream.
    """
    return lag_of(commits_after(path, processed_version(position)), position, time.time())


def processed_version(position: Position) -> int:
    """Return the newest version before which all versions are processed; -1 if the first one is not."""
    return -1 if position.offset is None else int(position.offset["reservoirVersion"]) - 1


def lag_of(commits: list[Commit], position: Position, now: float) -> Lag:
    """Return the lag at a time, from the commits after the processed version.

    Args:
        commits: The commits, in order.
        position: Position of the stream.
        now: Seconds since 1970.
    """
    offset = position.offset
    pending = [commit for commit in commits if commit.num_files]
    # Commits that the log no longer has may have changed rows.
    missing = commits[0].version - processed_version(position) - 1 if commits else 0
    if offset is None or offset["isStartingVersion"]:
        # A new stream reads the newest version as a whole.
        pending, missing = (pending or commits)[-1:] if missing else pending[-1:], 0
    elif missing:
        oldest = (pending or commits)[0]
        return Lag(missing + len(pending), max(0.0, now - oldest.seconds))
    elif pending and pending[0].version == int(offset["reservoirVersion"]):
        is_read = int(offset["index"]) + 1 >= pending[0].num_files  # The index is that of the last file that was read.
        pending = pending[1:] if is_read else pending
    return Lag(len(pending), max(0.0, now - pending[0].seconds) if pending else 0.0)
