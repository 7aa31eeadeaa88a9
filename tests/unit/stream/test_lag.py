"""The lag of a stream by its position and the commits of its table."""

import pytest

from tasks.stream.checkpoint import Position
from tasks.stream.lag import Lag, lag_of, processed_version
from tasks.tables.delta import Commit

COMMITS = [Commit(version, num_files, 100.0 + version) for version, num_files in ((3, 2), (4, 0), (5, 1))]
"""Two commits with changes, and a compaction between them."""


def position(version: int, index: int = -1, *, starting: bool = False) -> Position:
    """Return the position at a file of a version; -1 for a version that has not been begun."""
    return Position({"reservoirVersion": version, "index": index, "isStartingVersion": starting}, is_unfinished=False)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (position(3), Lag(2, 7.0)),
        (position(3, 0), Lag(2, 7.0)),
        (position(3, 1), Lag(1, 5.0)),
    ],
)
def test_versions_count_until_their_last_file_is_read(at: Position, expected: Lag) -> None:
    """A version whose files are read in part is behind; compaction is not counted."""
    assert processed_version(at) == 2
    assert lag_of(COMMITS, at, now=110.0) == expected


def test_stream_that_has_read_all_is_not_behind() -> None:
    """Commits without changes do not count, and a clock that is behind gives no negative age."""
    assert lag_of(COMMITS[1:2], position(4), now=110.0) == Lag(0, 0.0)
    assert lag_of(COMMITS[2:], position(5), now=50.0) == Lag(1, 0.0)


def test_commits_that_the_log_no_longer_has_count() -> None:
    """They may have changed rows, and so does a new stream read a table whose log begins with a compaction."""
    assert lag_of(COMMITS, position(1), now=110.0) == Lag(4, 7.0)
    assert lag_of(COMMITS[1:2], position(3), now=110.0) == Lag(1, 6.0)
    assert lag_of(COMMITS[1:2], Position(None, is_unfinished=False), now=110.0) == Lag(1, 6.0)
    empty = [Commit(0, 0, 100.0)]
    assert lag_of(empty, Position(None, is_unfinished=False), now=110.0) == Lag(0, 0.0)


def test_new_stream_is_one_version_behind() -> None:
    """It reads the newest version as a whole, not one version after the other."""
    assert lag_of(COMMITS, Position(None, is_unfinished=False), now=110.0) == Lag(1, 5.0)
    assert lag_of(COMMITS, position(5, 0, starting=True), now=110.0) == Lag(1, 5.0)
    assert lag_of([], Position(None, is_unfinished=False), now=110.0) == Lag(0, 0.0)
