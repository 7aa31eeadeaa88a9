"""The petastorm reader: exactly the given row groups, in the given order, read into their batches."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.assemble import Assembly, BatchMemory
from tasks.cache.manifest import CacheDamaged, read_manifest
from tasks.cache.order import Share, VirtualRanks, epoch_order, share_of
from tasks.cache.reader import open_reader
from tasks.cache.worker import Work, read_plain
from tasks.refs import CacheRef

SIDE = 16
BATCH = 5


@pytest.fixture
def urls(make_cache: Callable[..., CacheRef]) -> list[str]:
    """Paths of four files with two row groups of three rows each."""
    ref = make_cache({"train": 24}, image_size=SIDE)
    manifest = read_manifest(ref.url)
    assert manifest is not None
    return [f"{ref.url}/{file.name}" for file in manifest.splits["train"].files]


def open_share(urls: list[str], share: Share, workers_count: int = 2, *, local: bool = True) -> tuple[Any, Assembly]:
    """Return a reader of the share and the batches that it fills."""
    assembly = Assembly(share, 3, BatchMemory((BATCH, SIDE * SIDE * 3), 0, pin=False))
    work = Work(assembly, SIDE, SIDE * SIDE * 3, jpeg=False, local=local)
    if not local:
        urls = [f"file://{url}" for url in urls]
    return open_reader(urls, work, share.groups.tolist(), workers_count=workers_count, ahead=1), assembly


def whole_share(seed: int | None = None) -> Share:
    """Return the share of all 24 rows in batches of 5."""
    return share_of(epoch_order(24, 3, 2, seed, 0), BATCH, VirtualRanks())


@pytest.mark.parametrize("workers_count", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", [None, 5])
def test_row_groups_are_read_in_the_given_order(urls: list[str], seed: int | None, workers_count: int) -> None:
    """With any number of threads, all row groups are read in the given order."""
    share = whole_share(seed)

    reader, _assembly = open_share(urls, share, workers_count)
    with reader:
        assert list(reader) == share.groups.tolist()
    assert sorted(share.groups.tolist()) == list(range(8))


@pytest.mark.parametrize("local", [True, False])
def test_file_system_and_direct_reads_give_the_same_batches(urls: list[str], local: bool) -> None:
    """Files read through an Arrow file system, as on an object store, give the batches of direct local reads."""
    share = whole_share(5)

    reader, assembly = open_share(urls, share, local=local)
    with reader:
        list(reader)
    batches = [assembly.take(step) for step in range(share.num_batches)]

    direct_reader, direct = open_share(urls, share)
    with direct_reader:
        list(direct_reader)
    for step, (pixels, labels, rows) in enumerate(batches):
        other_pixels, other_labels, other_rows = direct.take(step)
        assert (pixels == other_pixels).all()
        assert (labels == other_labels).all()
        assert (rows == other_rows).all()


def test_reader_prints_nothing(urls: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Petastorm's message on closing is not printed, as events are parsed from a rank's output."""
    reader, _assembly = open_share(urls, whole_share())
    with reader:
        list(reader)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def overwrite(path: str, begin: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    changed = bytearray(Path(path).read_bytes())
    changed[begin : begin + len(content)] = content
    Path(path).write_bytes(changed)


@pytest.mark.timeout(60)
def test_damaged_page_raises_and_does_not_hang(urls: list[str]) -> None:
    """An error in a reader thread is raised to the consumer of the reader."""
    overwrite(urls[2], 4, b"\xff" * 12)  # The first page's header; the footer stays valid.

    reader, _assembly = open_share(urls, whole_share())
    with pytest.raises(CacheDamaged, match=f"{Path(urls[2]).name} has a damaged page header at byte 4"), reader:
        list(reader)
    gc.collect()  # The traceback holds the reader's files open until here.


def test_file_truncated_after_it_was_opened_is_reported(urls: list[str]) -> None:
    """A file that is truncated after its footer was read raises CacheDamaged instead of a partly filled batch."""
    assembly = Assembly(whole_share(), 3, BatchMemory((5, SIDE * SIDE * 3), 0, pin=False))
    read_plain(urls[1], 0, assembly.part(2), SIDE * SIDE * 3)  # The layout is cached now.
    with Path(urls[1]).open("rb+") as handle:
        handle.truncate(1000)

    with pytest.raises(CacheDamaged, match=f"{Path(urls[1]).name} ends within its row group 0"):
        read_plain(urls[1], 0, assembly.part(2), SIDE * SIDE * 3)


def test_swapped_files_are_damage(urls: list[str]) -> None:
    """Two swapped files are detected by the row numbers in them."""
    first, second = Path(urls[0]), Path(urls[1])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    reader, _assembly = open_share(urls, whole_share())
    with pytest.raises(CacheDamaged, match="has other rows in row group 0 than were written"), reader:
        list(reader)
    gc.collect()


def test_reader_closed_early_stops_its_threads(urls: list[str]) -> None:
    """A reader that is closed within an epoch leaves no thread running that would keep the process alive."""
    reader, _assembly = open_share(urls, whole_share())
    with reader:
        next(reader)
        pool = reader._workers_pool

    assert all(not thread.is_alive() for thread in pool._workers)
