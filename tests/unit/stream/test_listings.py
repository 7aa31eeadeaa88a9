"""The listings that hand new files over to the batches of a stream."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config.stream import StreamConfig
from tasks.errors import WrongInput
from tasks.schema import FILE_ARROW
from tasks.storage import Storage
from tasks.stream import listings
from tasks.stream.lag import Lag
from tasks.stream.listings import (
    LISTED,
    age_of_oldest,
    batches_of,
    follow_checkpoint,
    forget,
    hand_over,
    new_files,
    remove_processed,
    waiting,
    waiting_names,
)
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


def test_file_is_new_until_it_was_handed_over(storage: Storage, tmp_path: Path) -> None:
    """A file with another time is new again, and so is a file that vanished before it was read."""
    checkpoint, now = str(tmp_path / "check [1]" / "0"), listing(a=1, odd=2)
    assert new_files(now, checkpoint, storage) is now
    hand_over(now.table(), now, checkpoint, StreamConfig(max_files_per_batch=1), storage)
    assert waiting(checkpoint, 11.0) == Lag(0, 10.0, 2)
    assert paths(new_files(now, checkpoint, storage)) == []
    later = listing(a=1, b=7, odd=3)
    assert paths(new_files(later, checkpoint, storage)) == ["b", ODD]
    hand_over(files(b=7), later, checkpoint, StreamConfig(), storage)
    assert waiting(checkpoint, 11.0).files == 3
    processed = waiting_names(checkpoint)
    hand_over(files(c=8), later, checkpoint, StreamConfig(), storage)
    remove_processed(checkpoint, processed)
    assert waiting(checkpoint, 11.0) == Lag(0, 3.0, 1), "what another driver has handed over meanwhile"
    forget(("b", ODD), checkpoint, storage)
    assert paths(new_files(later, checkpoint, storage)) == ["b", ODD]
    assert list(Path(checkpoint).rglob(".*")) == []


@pytest.mark.parametrize("is_store", [False, True])
@pytest.mark.parametrize(("lacks", "expected"), [((), ["a"]), (("changed_at", "inode"), [])], ids=["own", "earlier"])
def test_touched_file_is_new_unless_the_last_listing_is_of_an_earlier_release(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_store: bool, lacks: tuple[str, ...],
    expected: list[str],
) -> None:  # fmt: skip
    """A file replaced in place, with its size and time, has another inode."""
    pq.write_table(files(a=1, b=2).drop_columns(list(lacks)), tmp_path / LISTED)
    if is_store:
        monkeypatch.setattr(listings, "local_path", lambda _url: None)
    now = files(a=1, b=2).set_column(4, "inode", pa.array([8, 7]))

    assert paths(new_files(spool_rows(now.to_batches(), FILE_ARROW), str(tmp_path), storage)) == expected


def test_run_that_is_killed_while_it_hands_over_loses_nothing(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of all files is written last: its files wait for a batch."""
    now, checkpoint, replaced = listing(a=1, b=2, c=3), str(tmp_path / "0"), []

    def die(_partial: str, name: str) -> None:
        replaced.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.stream.listings.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        hand_over(now.table(), now, checkpoint, StreamConfig(), storage)
    monkeypatch.undo()
    assert [Path(name).parent.name for name in replaced] == ["listings"]
    assert paths(new_files(now, checkpoint, storage)) == ["a", "b", "c"]
    assert waiting(checkpoint, 9.0).files == 0


def test_damaged_list_has_a_way_out(storage: Storage, tmp_path: Path) -> None:
    """The message names the checkpoint and the setting."""
    (tmp_path / LISTED).write_bytes(b"PAR1 PAR1")
    (tmp_path / "listings").mkdir()
    (tmp_path / "listings" / "1.parquet").write_bytes(b"")
    with pytest.raises(WrongInput, match=r"is damaged \(listings/1.parquet cannot be read\): set stream.restart"):
        waiting(str(tmp_path), 1.0)
    with pytest.raises(WrongInput, match=rf"'{tmp_path}' of the stream is damaged \(listed.parquet .*stream.restart"):
        new_files(listing(a=1), str(tmp_path), storage)


def test_age_is_that_of_the_oldest_file() -> None:
    """A clock that is behind gives no negative age."""
    assert age_of_oldest(files(a=5, b=2), 10.0) == 8.0
    assert age_of_oldest(files(a=5), 1.0) == 0.0
    assert age_of_oldest(files(), 1.0) == 0.0


def test_checkpoint_that_was_moved_has_its_listings_where_it_is(tmp_path: Path) -> None:
    """Spark records their whole paths, with a checksum of its own; a checkpoint that was not moved stays as it is."""
    checkpoint = tmp_path / "a checkpoint ü"
    log = checkpoint / "sources" / "0"
    log.mkdir(parents=True)
    line = '{{"path":"{}/{}.parquet","timestamp":1795812152187,"batchId":{}}}'
    own = f"file:{tmp_path}/a%20checkpoint%20ü/listings"
    texts = {
        "8": "\n".join(["v1", line.format(own, "a", 8)]),
        "9.compact": "\n".join(["v1", line.format("file:///former/listings", "a", 8), line.format(own, "b", 9)]),
    }
    for name, text in texts.items():
        (log / name).write_text(text)
        (log / f".{name}.crc").write_bytes(b"crc")

    follow_checkpoint(str(checkpoint))

    assert (log / "8").read_text() == texts["8"]
    new = f"{(checkpoint / 'listings').as_uri()}"
    assert (log / "9.compact").read_text() == texts["9.compact"].replace("file:///former/listings", new)
    assert sorted(file.name for file in log.iterdir()) == [".8.crc", "8", "9.compact"]
    follow_checkpoint("s3a://bucket/checkpoint")
    for damage in ("", "v1\n{", "v1\n[]", 'v1\n{"path": 1}'):
        (log / "8").write_text(damage)
        with pytest.raises(WrongInput, match="is damaged .sources/0/8 cannot be read.: "):
            follow_checkpoint(str(checkpoint))
