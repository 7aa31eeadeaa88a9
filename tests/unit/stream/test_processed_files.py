"""The record of the files that a stream on a folder has processed, and the batches of the others."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from tasks.config.prediction import StreamConfig
from tasks.errors import WrongInput
from tasks.schema import FILE_ARROW
from tasks.storage import Storage
from tasks.stream import processed_files
from tasks.stream.checkpoint import RESTART
from tasks.stream.processed_files import BATCH, LISTED, ProcessedFiles, age_of_oldest, batches_of
from tasks.tables.parquet_rows import SpooledRows, spool_rows

ODD = "ä 50%\n#[1]{a}.png"


def listing(**seconds_of: int) -> SpooledRows:
    """Return a listing of files of 10 bytes with these names and times; `odd` stands for ODD."""
    return spool_rows(files(**seconds_of).to_batches(), FILE_ARROW)


def files(**seconds_of: int) -> pa.Table:
    """Return the rows of `listing`."""
    names = [ODD if name == "odd" else name for name in seconds_of]
    times = [datetime.fromtimestamp(seconds, UTC) for seconds in seconds_of.values()]
    return pa.table([names, [10] * len(names), times, times, [7] * len(names)], schema=FILE_ARROW)


def paths(rows: SpooledRows | pa.Table) -> list[str]:
    """Return the paths of files."""
    table = rows.table() if isinstance(rows, SpooledRows) else rows
    found: list[str] = table["path"].to_pylist()
    return found


def test_batch_is_full_with_a_number_of_files_or_megabytes() -> None:
    """A file that is larger than a batch is in one; none is left out or twice."""
    sizes = [1, 1, 1, 5_000_000, 1, 999_999, 1]
    rows = pa.table([[str(number) for number in range(7)], sizes, *[[None] * 7] * 3], schema=FILE_ARROW)
    bounds = StreamConfig(max_files_per_batch=3, max_megabytes_per_batch=1)
    assert [paths(part) for part in batches_of(rows, bounds)] == [["0", "1", "2"], ["3"], ["4", "5"], ["6"]]
    assert list(batches_of(rows.slice(0, 0), bounds)) == []


def test_files_that_wait_in_listings_of_an_earlier_release_are_new(storage: Storage, tmp_path: Path) -> None:
    """They were recorded before their batch; the other files stay recorded, and the listings go."""
    checkpoint = tmp_path / "check [1]" / "0"
    processed, now = ProcessedFiles(str(checkpoint), storage), listing(a=1, b=2, odd=3)
    processed.replace(now, [])
    (checkpoint / "listings").mkdir()
    pq.write_table(files(b=2, odd=3), checkpoint / "listings" / "1.parquet")

    processed.take_back_listings()

    assert sorted(paths(processed.new_files(now))) == ["b", ODD]
    assert [file.name for file in checkpoint.iterdir()] == [LISTED]
    (checkpoint / "listings").mkdir()
    (checkpoint / "listings" / "2.parquet").touch()
    with pytest.raises(WrongInput, match="2.parquet cannot be read") as refused:
        processed.take_back_listings()
    assert refused.value.way_out == RESTART


def test_file_is_new_until_its_batch_has_ended(storage: Storage, tmp_path: Path) -> None:
    """A file with another time is new again, and so is a file that vanished before it was read."""
    checkpoint = tmp_path / "check [1]" / "0"
    processed, now = ProcessedFiles(str(checkpoint), storage), listing(a=1, odd=2)
    assert processed.new_files(now) is now
    processed.add_batch(files(a=1), [])
    assert paths(processed.new_files(now)) == [ODD]
    processed.add_batch(files(odd=2), [])
    assert paths(processed.new_files(now)) == []
    later = listing(a=1, b=7, odd=3)
    assert paths(processed.new_files(later)) == ["b", ODD]
    processed.add_batch(files(b=7, odd=3), ["b"])
    assert paths(processed.new_files(later)) == ["b"]
    assert len(list(checkpoint.iterdir())) == 3
    processed.replace(later, ["b", ODD])
    assert paths(processed.new_files(later)) == ["b", ODD]
    processed.replace(later, [])
    assert paths(processed.new_files(listing(a=1, b=7, c=8, odd=2))) == ["c", ODD]
    assert [path.name for path in checkpoint.iterdir()] == [LISTED]


@pytest.mark.parametrize("is_store", [False, True])
@pytest.mark.parametrize(("lacks", "expected"), [((), ["a"]), (("changed_at", "inode"), [])], ids=["own", "earlier"])
def test_touched_file_is_new_unless_the_last_listing_is_of_an_earlier_release(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_store: bool, lacks: tuple[str, ...],
    expected: list[str],
) -> None:  # fmt: skip
    """A file replaced in place, with its size and time, has another inode."""
    pq.write_table(files(a=1, b=2).drop_columns(list(lacks)), tmp_path / LISTED)
    if is_store:
        monkeypatch.setattr(processed_files, "local_path", lambda _url: None)
    now = files(a=1, b=2).set_column(4, "inode", pa.array([8, 7]))
    processed = ProcessedFiles(str(tmp_path), storage)

    assert paths(processed.new_files(spool_rows(now.to_batches(), FILE_ARROW))) == expected

    if expected:
        processed.add_batch(now.slice(0, 1), [])
        assert paths(processed.new_files(spool_rows(now.to_batches(), FILE_ARROW))) == []


def test_run_that_is_killed_while_it_records_loses_nothing(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record gets its name when it is whole, and the records of batches stay until the one of all files has it."""
    now, processed, named = listing(a=1, b=2, c=3), ProcessedFiles(str(tmp_path / "0"), storage), []
    processed.add_batch(files(a=1), [])

    def die(_filesystem: object, _partial: str, name: str) -> None:
        named.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "mv", die)
    with pytest.raises(KeyboardInterrupt):
        processed.add_batch(files(b=2), [])
    with pytest.raises(KeyboardInterrupt):
        processed.replace(now, [])
    monkeypatch.undo()
    assert [Path(name).name.startswith(begin) for name, begin in zip(named, (BATCH, LISTED), strict=True)] == [True] * 2
    assert paths(processed.new_files(now)) == ["b", "c"]
    processed.replace(now, [])
    assert [path.name for path in (tmp_path / "0").iterdir()] == [LISTED]


@pytest.mark.parametrize("name", [LISTED, f"{BATCH}1.parquet"])
def test_damaged_record_has_a_way_out(storage: Storage, tmp_path: Path, name: str) -> None:
    """The message names the checkpoint and the setting."""
    (tmp_path / name).write_bytes(b"PAR1 PAR1")
    with pytest.raises(WrongInput, match=rf"'{tmp_path}' .* \({name} cannot be read\)") as refused:
        ProcessedFiles(str(tmp_path), storage).new_files(listing(a=1))
    assert refused.value.way_out == RESTART


def test_age_is_that_of_the_oldest_file() -> None:
    """A clock that is behind gives no negative age."""
    assert age_of_oldest(files(a=5, b=2), 10.0) == 8.0
    assert age_of_oldest(files(a=5), 1.0) == 0.0
    assert age_of_oldest(files(), 1.0) == 0.0
