"""petastorm's reader as we open it: every row group, in one order for one seed."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.manifest import read_manifest
from tasks.cache.reader import open_reader
from tasks.refs import CacheRef

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def urls(make_cache: Callable[..., CacheRef]) -> list[str]:
    """Four files of two row groups of three rows each."""
    ref = make_cache({"train": 24})
    manifest = read_manifest(ref.url)
    assert manifest is not None
    return [f"file://{ref.url}/{file.name}" for file in manifest.splits["train"].files]


def first_rows(urls: list[str], **how: Any) -> list[int]:
    """Return the number of the first row of each row group, in the order they are read."""
    settings = {"seed": None, "rank": 0, "num_ranks": 1, "workers_count": 2} | how
    with open_reader(urls, **settings) as reader:
        return [int(group.row[0]) for group in reader]


@pytest.mark.parametrize("workers_count", [1, 2, 3, 9])
def test_row_groups_come_in_order_without_a_seed(urls: list[str], workers_count: int) -> None:
    """However many threads read, the order is that of the files."""
    assert first_rows(urls, workers_count=workers_count) == list(range(0, 24, 3))


def test_seed_draws_the_order_and_the_number_of_threads_does_not(urls: list[str]) -> None:
    """The same seed gives the same order on any machine; another seed gives another."""
    drawn = first_rows(urls, seed=5)

    assert first_rows(urls, seed=5, workers_count=5) == drawn
    assert sorted(drawn) == list(range(0, 24, 3))
    assert drawn != sorted(drawn)
    assert any(first_rows(urls, seed=seed) != drawn for seed in (6, 7))


@pytest.mark.parametrize("seed", [None, 5])
def test_rank_reads_every_num_ranks_th_row_group(urls: list[str], seed: int | None) -> None:
    """Row group i is rank i mod 3's, shuffled or not."""
    for rank in range(3):
        read = first_rows(urls, seed=seed, rank=rank, num_ranks=3)
        assert sorted(row // 3 for row in read) == list(range(rank, 8, 3))


def test_reader_prints_nothing(urls: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Petastorm's line on closing stays out of a rank's output, where events are read."""
    first_rows(urls)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""


@pytest.mark.timeout(60)
def test_damaged_row_group_raises_and_does_not_hang(urls: list[str]) -> None:
    """What goes wrong in a reading thread comes out where the rows are asked for."""
    path = Path(urls[2].removeprefix("file://"))
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56  # The first page's header; the footer stays whole.
    path.write_bytes(content)

    with pytest.raises(OSError, match="page header"):
        first_rows(urls)
    gc.collect()  # The traceback holds the reader's files open until here.


def test_reader_left_early_ends_its_threads(urls: list[str]) -> None:
    """A training that is ended within an epoch leaves nothing behind that would keep the process alive."""
    with open_reader(urls, seed=None, rank=0, num_ranks=1, workers_count=2) as reader:
        next(reader)
        pool = reader._workers_pool

    assert all(not thread.is_alive() for thread in pool._workers)
