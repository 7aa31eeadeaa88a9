"""The folders of a stream's checkpoints, the positions in them, and the lag by these and the commits of the table."""

from pathlib import Path

import pytest

from tasks.errors import WrongInput
from tasks.stream.checkpoint import (
    RESTART,
    Position,
    checkpoint_root,
    lag_of,
    open_checkpoint,
    processed_version,
    read_position,
    remove_older,
)
from tasks.stream.run import Lag
from tasks.tables.delta import Commit

COMMITS = [Commit(version, num_files, 100.0 + version) for version, num_files in ((3, 2), (4, 0), (5, 1))]
"""Two commits with changes, and a compaction between them."""


def write_checkpoint(folder: Path, offsets: int, commits: int) -> Path:
    """Write the files of a checkpoint as Spark does, with so many batches begun and ended."""
    for name, number in (("offsets", offsets), ("commits", commits)):
        (folder / name).mkdir(parents=True)
        for batch in range(number):
            (folder / name / str(batch)).write_text(f'v1\n{{}}\n{{"reservoirVersion":{batch}}}')
            (folder / name / f".{batch}.crc").write_bytes(b"crc")
    (folder / "metadata").write_text('{"id":"a"}')
    return folder


def test_each_stream_has_a_folder_of_its_own() -> None:
    """Another table, predictions, model or alias is another stream."""
    one = checkpoint_root("s3a://bucket/predictions/", "changes", "table", "id", "", "champion")
    assert one.startswith("s3a://bucket/predictions.streams/")
    assert one == checkpoint_root("s3a://bucket/predictions", "changes", "table", "id", "", "champion")
    assert one != checkpoint_root("s3a://bucket/predictions", "changes", "table", "id", "", "challenger")
    assert one != checkpoint_root("s3a://bucket/predictions", "changes", "tablei", "d", "", "champion")


def test_restart_begins_the_next_folder_and_the_older_ones_are_removed_later(tmp_path: Path) -> None:
    """A restart that is killed leaves the newer folder, with which the next run continues."""
    root = str(tmp_path / "root")
    assert open_checkpoint(root, restart=True) == open_checkpoint(root, restart=False) == f"{root}/0"
    write_checkpoint(tmp_path / "root" / "0", 1, 1)
    assert open_checkpoint(root, restart=True) == f"{root}/1"
    write_checkpoint(tmp_path / "root" / "1", 1, 0)
    assert open_checkpoint(root, restart=False) == f"{root}/1"
    remove_older(f"{root}/1")
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["1"]


def test_position_is_that_of_the_last_batch_that_ended(tmp_path: Path) -> None:
    """A batch without an end is repeated; a stream that has begun none has no position."""
    assert read_position(str(tmp_path / "missing")) == Position(None, is_unfinished=False)
    ended = write_checkpoint(tmp_path / "ended", 2, 2)
    assert read_position(str(ended)) == Position({"reservoirVersion": 1}, is_unfinished=False)
    begun = write_checkpoint(tmp_path / "begun", 3, 2)
    assert read_position(str(begun)) == Position({"reservoirVersion": 1}, is_unfinished=True)
    first = write_checkpoint(tmp_path / "first", 1, 0)
    assert read_position(str(first)) == Position(None, is_unfinished=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [("metadata", "{"), ("offsets/1", ""), ("offsets/1", "v1\n{}\n7"), ("metadata", None), ("offsets/1", None)],
)
def test_damaged_checkpoint_is_named_with_the_way_out(tmp_path: Path, name: str, text: str | None) -> None:
    """Files that are missing or no JSON objects are found before Spark is started."""
    folder = write_checkpoint(tmp_path / "0", 2, 2)
    (folder / name).write_text(text) if text is not None else (folder / name).unlink()
    with pytest.raises(WrongInput, match=r"'.*/0' of the stream is damaged") as refused:
        read_position(str(folder))
    assert refused.value.way_out == RESTART


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
