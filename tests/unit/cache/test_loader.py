"""The loader's promises: on any number of ranks every row once, and the same again for the same seed."""

import random
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheFile, CacheManifest, CacheSplit, open_cache
from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, TableRef
from tests.builders.split_batches import load, read_ranks, rows_of
from tests.unit.cache.conftest import ROWS

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_row_is_read_exactly_once(cache: CacheRef, num_ranks: int, seed: int | None) -> None:
    """Over all ranks nothing is dropped, doubled or invented, and padding is never seen."""
    ranks = read_ranks(cache, num_ranks, seed)

    assert sorted(row for batches in ranks for row in rows_of(batches)) == list(range(ROWS))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_steps_and_images_of_a_step_are_as_promised(cache: CacheRef, num_ranks: int) -> None:
    """Every rank makes the same number of steps, and together they have num_global_rows(step) images in each."""
    ranks = read_ranks(cache, num_ranks, seed=7)

    loader = load(cache, num_ranks=num_ranks)
    assert {len(batches) for batches in ranks} == {loader.num_steps}
    for step in range(loader.num_steps):
        assert sum(len(batches[step].labels_B) for batches in ranks) == loader.num_global_rows(step)


def test_more_ranks_than_images_work(cache: CacheRef) -> None:
    """Of thirty ranks seven have nothing to read, and take part with empty batches of the right shape."""
    ranks = read_ranks(cache, 30, seed=7)

    assert sorted(row for batches in ranks for row in rows_of(batches)) == list(range(ROWS))
    idle = [batches for batches in ranks if not rows_of(batches)]
    assert len(idle) == 7
    assert all(batch.inputs.shape == (0, 16, 16, 3) for batches in idle for batch in batches)
    assert {len(batches) for batches in ranks} == {1}


def test_same_seed_is_the_same_order(cache: CacheRef) -> None:
    """Two loaders with one seed draw the same batches, whatever the number of reading threads."""
    first = rows_of(list(load(cache, seed=7).epoch(2)))

    assert rows_of(list(load(cache, seed=7, workers_count=5).epoch(2))) == first


def test_another_epoch_or_seed_is_another_order(cache: CacheRef) -> None:
    """Each epoch is drawn anew, and each seed draws its own."""
    orders = {
        tuple(rows_of(list(load(cache, seed=seed).epoch(epoch)))) for seed, epoch in ((7, 0), (7, 1), (7, 2), (8, 0))
    }

    assert len(orders) == 4


def test_loader_may_be_asked_for_an_epoch_again(cache: CacheRef) -> None:
    """A loader keeps no state between epochs: what a resumed training reads is what the killed one would have read."""
    loader = load(cache, seed=7)
    expected = rows_of(list(loader.epoch(1)))
    list(loader.epoch(0))

    assert rows_of(list(loader.epoch(1))) == expected


def test_without_a_seed_the_order_is_the_cache_s(cache: CacheRef) -> None:
    """Validation reads rows as they were written."""
    assert rows_of(list(load(cache).epoch(0))) == list(range(ROWS))


def test_pixels_and_label_belong_to_their_row(cache: CacheRef) -> None:
    """Shuffling moves pixels, label and row number together, and the pixels are those that were written."""
    for batch in load(cache, seed=7).epoch(0):
        for image, label, row in zip(batch.inputs.numpy(), batch.labels_B.tolist(), batch.rows_B, strict=True):
            written = np.random.default_rng(int(row)).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            assert np.array_equal(image, written)
            assert label == row % 3


def test_batches_are_full_but_the_last(cache: CacheRef) -> None:
    """23 rows in batches of 4 are five of 4 and one of 3."""
    assert [len(batch.labels_B) for batch in load(cache, seed=7).epoch(0)] == [4, 4, 4, 4, 4, 3]


def test_pool_of_the_least_size_loses_nothing(make_cache: Callable[..., CacheRef]) -> None:
    """A pool that holds one batch and one row group still gives every row once, in another order than written."""
    cache = make_cache({"train": 200}, rows_per_group=7, groups_per_file=5)

    rows = rows_of(list(load(cache, batch_size=8, seed=7, pool_megabytes=0).epoch(0)))

    assert sorted(rows) == list(range(200))
    assert rows != sorted(rows)


def test_pool_shuffles_across_row_groups(make_cache: Callable[..., CacheRef]) -> None:
    """A batch mixes rows of many row groups, not the neighbours that were read together."""
    cache = make_cache({"train": 200}, rows_per_group=10)

    first = next(iter(load(cache, batch_size=20, seed=7).epoch(0)))

    assert len({int(row) // 10 for row in first.rows_B}) > 5


def test_rows_of_one_group_are_shuffled_in_each_epoch(make_cache: Callable[..., CacheRef]) -> None:
    """The pool draws anew in each epoch, also where there is one row group and no order of groups to draw."""
    loader = load(make_cache({"train": 30}, rows_per_group=30), seed=7)

    orders = [rows_of(list(loader.epoch(epoch))) for epoch in range(3)]

    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_row_groups_are_read_in_another_order_in_each_epoch(make_cache: Callable[..., CacheRef]) -> None:
    """With a pool of two rows the first image is one of the first two read: not always of the same two."""
    cache = make_cache({"train": 12}, rows_per_group=1, groups_per_file=6)
    loader = load(cache, batch_size=1, seed=7, pool_megabytes=0)

    assert len({int(next(iter(loader.epoch(epoch))).rows_B[0]) for epoch in range(10)}) > 2


def test_batch_larger_than_the_split_is_the_split(cache: CacheRef) -> None:
    """One step has everything."""
    batches = list(load(cache, batch_size=100, seed=7).epoch(0))

    assert [len(batch.labels_B) for batch in batches] == [ROWS]


@pytest.mark.timeout(120)
def test_thirty_epochs_in_a_row_lose_no_row_group(make_cache: Callable[..., CacheRef]) -> None:
    """The race in petastorm's own thread pool, which lost row groups in every third epoch, is not ours."""
    cache = make_cache({"train": 63}, rows_per_group=1, groups_per_file=16)
    loader = load(cache, batch_size=16, seed=7)

    for epoch in range(30):
        assert sorted(rows_of(list(loader.epoch(epoch)))) == list(range(63)), f"epoch {epoch}"


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (4, 2), (3, 5)])
def test_epoch_goes_on_where_it_was_left_on_any_number_of_ranks(
    make_cache: Callable[..., CacheRef], before: int, after: int
) -> None:
    """Two steps on some ranks and the rest on others, with another batch size, are every image exactly once."""
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


def test_resumed_epoch_is_the_rest_of_the_one_never_left(cache: CacheRef) -> None:
    """On as many ranks with the same batch size, the batches after a position are the very ones."""
    loader = load(cache, seed=7)
    whole = [batch.rows_B.tolist() for batch in loader.epoch(1)]

    assert [batch.rows_B.tolist() for batch in loader.epoch(1, start=loader.position(3))] == whole[3:]
    assert list(loader.epoch(1, start=ROWS)) == []


@pytest.mark.parametrize("start", [-1, ROWS + 1])
def test_position_outside_the_epoch_is_refused(cache: CacheRef, start: int) -> None:
    """A checkpoint of another cache does not begin somewhere by chance."""
    with pytest.raises(WrongInput, match=f"start is {start}, an epoch of 23 images has no such position"):
        next(load(cache, seed=7).epoch(0, start=start))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_has_the_same_images_on_any_number_of_ranks(cache: CacheRef, num_ranks: int) -> None:
    """A step of R ranks with batches of B is the step of one process with batches of R B."""
    ranks = read_ranks(cache, num_ranks, seed=7)
    alone = list(load(cache, batch_size=4 * num_ranks, seed=7).epoch(0))

    for step, batch in enumerate(alone):
        assert sorted(row for batches in ranks for row in rows_of([batches[step]])) == sorted(rows_of([batch]))


def test_counts_add_up_for_any_shape_of_cache() -> None:
    """For 300 drawn shapes, images of steps sum to the rows of the split, and no step is idle."""
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
        loader = CacheLoader("/nowhere", manifest, "train", batch_size, num_ranks=num_ranks)

        steps = [loader.num_global_rows(step) for step in range(loader.num_steps)]
        assert sum(steps) == rows
        assert all(steps)
        assert loader.num_global_rows(loader.num_steps) == 0


@pytest.mark.parametrize("folder", ["my data", "100%20x", "größe", "a=b", "a,b", "a#b", "q?x"])
def test_cache_may_lie_in_a_folder_of_any_name(make_cache: Callable[..., CacheRef], folder: str) -> None:
    """Spaces, unicode and what a URL would escape are parts of a folder's name."""
    cache = make_cache({"train": 7}, folder=folder)

    loader = CacheLoader(cache.url, open_cache(cache), "train", 4)

    assert [int(row) for batch in loader.epoch(0) for row in batch.rows_B] == list(range(7))
