"""The loader: every row exactly once on any number of ranks, and the same order for the same seed."""

import random
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheFile, CacheManifest, CacheSplit, open_cache
from tasks.cache.order import VirtualRanks
from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, TableRef
from tests.builders.split_batches import load, read_ranks, rows_of
from tests.unit.cache.conftest import ROWS


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_row_is_read_exactly_once(cache: CacheRef, num_ranks: int, seed: int | None) -> None:
    """Over all ranks, no row is dropped or repeated, and padding is never returned."""
    ranks = read_ranks(cache, num_ranks, seed)

    assert sorted(row for batches in ranks for row in rows_of(batches)) == list(range(ROWS))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_number_of_steps_and_images_per_step_is_as_computed(cache: CacheRef, num_ranks: int) -> None:
    """Every rank has num_steps steps, and step s has num_global_rows(s) images over all ranks."""
    ranks = read_ranks(cache, num_ranks, seed=7)

    loader = load(cache, num_ranks=num_ranks)
    assert {len(batches) for batches in ranks} == {loader.num_steps}
    for step in range(loader.num_steps):
        assert sum(len(batches[step].labels_B) for batches in ranks) == loader.num_global_rows(step)


def test_more_ranks_than_images_work(cache: CacheRef) -> None:
    """With 30 ranks and 23 images, seven ranks yield empty batches of the right shape."""
    ranks = read_ranks(cache, 30, seed=7)

    assert sorted(row for batches in ranks for row in rows_of(batches)) == list(range(ROWS))
    idle = [batches for batches in ranks if not rows_of(batches)]
    assert len(idle) == 7
    assert all(batch.inputs.shape == (0, 16, 16, 3) for batches in idle for batch in batches)
    assert {len(batches) for batches in ranks} == {1}


def test_same_seed_gives_the_same_order(cache: CacheRef) -> None:
    """Two loaders with the same seed yield the same batches with any number of reader threads."""
    first = rows_of(list(load(cache, seed=7).epoch(2)))

    assert rows_of(list(load(cache, seed=7, workers_count=5).epoch(2))) == first


def test_another_epoch_or_seed_gives_another_order(cache: CacheRef) -> None:
    """The order differs between epochs and between seeds."""
    orders = {
        tuple(rows_of(list(load(cache, seed=seed).epoch(epoch)))) for seed, epoch in ((7, 0), (7, 1), (7, 2), (8, 0))
    }

    assert len(orders) == 4


def test_epoch_can_be_repeated(cache: CacheRef) -> None:
    """A loader keeps no state between epochs: a resumed run reads the same batches as the killed one."""
    loader = load(cache, seed=7)
    expected = rows_of(list(loader.epoch(1)))
    list(loader.epoch(0))

    assert rows_of(list(loader.epoch(1))) == expected


def test_order_without_a_seed_is_that_of_the_cache(cache: CacheRef) -> None:
    """Without a seed, as in validation, rows are read in the order in which they were written."""
    assert rows_of(list(load(cache).epoch(0))) == list(range(ROWS))


def test_pixels_and_label_belong_to_their_row(cache: CacheRef) -> None:
    """After shuffling, pixels and label of each row are those that were written."""
    for batch in load(cache, seed=7).epoch(0):
        for image, label, row in zip(batch.inputs.numpy(), batch.labels_B.tolist(), batch.rows_B, strict=True):
            written = np.random.default_rng(int(row)).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            assert np.array_equal(image, written)
            assert label == row % 3


def test_all_batches_but_the_last_are_full(cache: CacheRef) -> None:
    """23 rows in batches of 4 give five batches of 4 and one of 3."""
    assert [len(batch.labels_B) for batch in load(cache, seed=7).epoch(0)] == [4, 4, 4, 4, 4, 3]


def test_smallest_pool_loses_no_row(make_cache: Callable[..., CacheRef]) -> None:
    """A pool of one batch and one row group yields every row once, in another order than written."""
    cache = make_cache({"train": 200}, rows_per_group=7, groups_per_file=5)

    rows = rows_of(list(load(cache, batch_size=8, seed=7, pool_megabytes=0).epoch(0)))

    assert sorted(rows) == list(range(200))
    assert rows != sorted(rows)


def test_pool_shuffles_across_row_groups(make_cache: Callable[..., CacheRef]) -> None:
    """A batch has rows of many row groups."""
    cache = make_cache({"train": 200}, rows_per_group=10)

    first = next(iter(load(cache, batch_size=20, seed=7).epoch(0)))

    assert len({int(row) // 10 for row in first.rows_B}) > 5


def test_rows_of_one_group_are_shuffled_in_each_epoch(make_cache: Callable[..., CacheRef]) -> None:
    """Rows are shuffled in each epoch even if there is only one row group."""
    loader = load(make_cache({"train": 30}, rows_per_group=30), seed=7)

    orders = [rows_of(list(loader.epoch(epoch))) for epoch in range(3)]

    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_order_of_row_groups_differs_between_epochs(make_cache: Callable[..., CacheRef]) -> None:
    """With a pool of two rows the first image is one of the first two read, which differ between epochs."""
    cache = make_cache({"train": 12}, rows_per_group=1, groups_per_file=6)
    loader = load(cache, batch_size=1, seed=7, pool_megabytes=0)

    assert len({int(next(iter(loader.epoch(epoch))).rows_B[0]) for epoch in range(10)}) > 2


def test_batch_larger_than_the_split_has_all_rows(cache: CacheRef) -> None:
    """With a batch size above the size of the split there is one batch of all rows."""
    batches = list(load(cache, batch_size=100, seed=7).epoch(0))

    assert [len(batch.labels_B) for batch in batches] == [ROWS]


@pytest.mark.timeout(120)
def test_thirty_epochs_lose_no_row_group(make_cache: Callable[..., CacheRef]) -> None:
    """The loader does not have the race of petastorm's thread pool, which lost row groups in every third epoch."""
    cache = make_cache({"train": 63}, rows_per_group=1, groups_per_file=16)
    loader = load(cache, batch_size=16, seed=7)

    for epoch in range(30):
        assert sorted(rows_of(list(loader.epoch(epoch)))) == list(range(63)), f"epoch {epoch}"


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (4, 2), (3, 5)])
def test_epoch_can_be_resumed_on_any_number_of_ranks(
    make_cache: Callable[..., CacheRef], before: int, after: int
) -> None:
    """Two steps and the rest on another number of ranks with another batch size have every image exactly once."""
    cache = make_cache({"train": 100}, rows_per_group=7)
    seen: list[int] = []
    for rank in range(before):
        loader = load(cache, batch_size=6, seed=7, rank=rank, num_ranks=before)
        seen += rows_of(list(islice(loader.epoch(3), 2)))
    position = loader.position(2)
    assert position == len(seen) == 12 * before

    steps = set()
    for rank in range(after):
        loader = load(cache, batch_size=5, seed=7, rank=rank, num_ranks=after)
        batches = list(loader.epoch(3, start=position))
        steps.add(len(batches))
        seen += rows_of(batches)

    assert sorted(seen) == list(range(100))
    assert steps == {loader.steps_from(position)}
    counted = [loader.num_global_rows(step, position) for step in range(loader.steps_from(position))]
    assert sum(counted) == 100 - position


def test_resumed_epoch_equals_uninterrupted_epoch(cache: CacheRef) -> None:
    """With the same number of ranks and batch size, the batches after a position are those of the whole epoch."""
    loader = load(cache, seed=7)
    uninterrupted = [batch.rows_B.tolist() for batch in loader.epoch(1)]

    assert [batch.rows_B.tolist() for batch in loader.epoch(1, start=loader.position(3))] == uninterrupted[3:]
    assert list(loader.epoch(1, start=ROWS)) == []


@pytest.mark.parametrize("start", [-1, ROWS + 1])
def test_position_outside_the_epoch_is_refused(cache: CacheRef, start: int) -> None:
    """A position outside the epoch, as from a checkpoint of another cache, is refused."""
    with pytest.raises(WrongInput, match=f"start is {start}, .* 23 images: give 0 to 23"):
        next(load(cache, seed=7).epoch(0, start=start))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_step_has_the_same_images_on_any_number_of_ranks(cache: CacheRef, num_ranks: int) -> None:
    """A step of R ranks with batch size B has the images of a step of one process with batch size R * B."""
    ranks = read_ranks(cache, num_ranks, seed=7)
    single = list(load(cache, batch_size=4 * num_ranks, seed=7).epoch(0))

    for step, batch in enumerate(single):
        assert sorted(row for batches in ranks for row in rows_of([batches[step]])) == sorted(rows_of([batch]))


def test_images_per_step_sum_to_the_rows_of_the_split() -> None:
    """For 300 random shapes of caches, the images per step sum to the rows of the split, and no step is empty."""
    draw = random.Random(1)
    for _ in range(300):
        rows, rows_per_group = draw.randint(1, 60), draw.randint(1, 12)
        num_ranks, batch_size = draw.randint(1, 9), draw.randint(1, 20)
        groups = -(-rows // rows_per_group)
        file = CacheFile(name="x", rows=rows, row_groups=groups, bytes=0, sha256="")
        manifest = CacheManifest(
            format=1,
            table=TableRef(path="x", version=0),
            content_digest="",
            settings=CacheConfig(image_size=16),
            classes=("a", "b"),
            splits={"train": CacheSplit(rows=rows, rows_per_group=rows_per_group, files=(file,))},
        )
        loader = CacheLoader("/nowhere", manifest, "train", batch_size, ranks=VirtualRanks.of(0, num_ranks))

        steps = [loader.num_global_rows(step) for step in range(loader.num_steps)]
        assert sum(steps) == rows
        assert all(steps)
        assert loader.num_global_rows(loader.num_steps) == 0


@pytest.mark.parametrize("folder", ["my data", "100%20x", "größe", "a=b", "a,b", "a#b", "q?x"])
def test_cache_can_be_in_a_folder_of_any_name(make_cache: Callable[..., CacheRef], folder: str) -> None:
    """A cache can be read from a folder with spaces, Unicode or reserved URL characters in its name."""
    cache = make_cache({"train": 7}, folder=folder)

    loader = CacheLoader(cache.url, open_cache(cache), "train", 4)

    assert [int(row) for batch in loader.epoch(0) for row in batch.rows_B] == list(range(7))
