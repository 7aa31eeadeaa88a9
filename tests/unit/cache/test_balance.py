"""Epochs with as many images of each class."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tasks.cache.loader import CacheLoader, read_labels
from tasks.cache.manifest import open_cache
from tasks.cache.order import MAX_REPEATS, VirtualRanks, balanced_counts, epoch_order
from tasks.refs import CacheRef


@pytest.mark.parametrize("sizes", [[60, 2, 10], [1, 1], [7], [300, 100, 20, 1]])
def test_classes_are_equally_often_and_images_of_a_class_too(sizes: list[int]) -> None:
    """The epoch is as long as without balance, and another one repeats or leaves out other images."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    drawn = [balanced_counts(labels, np.random.default_rng(seed)) for seed in range(30)]

    for counts in drawn:
        assert counts.sum() == len(labels)
        for label, size in enumerate(sizes):
            own = counts[labels == label]
            assert own.max() - own.min() <= 1
            wanted = min(len(labels) / len(sizes), MAX_REPEATS * size)
            assert own.sum() == pytest.approx(wanted, abs=1) or MAX_REPEATS * min(sizes) < len(labels) / len(sizes)
    if max(sizes) > 2 * min(sizes):
        assert len({tuple(counts) for counts in drawn}) > 1
        assert np.stack(drawn).sum(axis=0).min() > 0, "every image is in some epoch"


def test_image_of_a_tiny_class_is_repeated_a_limited_number_of_times() -> None:
    """The others share what it does not take."""
    labels = np.repeat([0, 1, 2], [500, 500, 1])
    counts = balanced_counts(labels, np.random.default_rng(0))

    assert counts[-1] == MAX_REPEATS
    assert counts[:500].sum() == pytest.approx((1001 - MAX_REPEATS) / 2, abs=1)


def test_epoch_without_balance_has_the_order_of_before() -> None:
    """Row groups are drawn alike with and without."""
    labels = np.arange(100) % 3
    assert epoch_order(100, 7, 3, 1, 4).group_places.tolist() == (
        epoch_order(100, 7, 3, 1, 4, labels).group_places.tolist()
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("kind", ["uint8", "jpeg"])
def test_loader_repeats_images_of_small_classes(make_cache: Callable[..., CacheRef], kind: str, num_ranks: int) -> None:
    """Pixels and labels are those of the rows, on any number of ranks, and an epoch continues at any position."""
    cache = make_cache({"train": 23}, format=kind)
    manifest = open_cache(cache)
    labels = read_labels(cache.url, manifest, "train")
    assert labels.tolist() == [row % 3 for row in range(23)]
    as_few = np.where(np.arange(23) < 21, 0, labels)  # a class of 21 images, and two of one

    def epoch(start: int = 0) -> list[int]:
        rows = []
        for rank in range(num_ranks):
            ranks = VirtualRanks.of(rank, num_ranks)
            loader = CacheLoader(cache.url, manifest, "train", 4, seed=1, ranks=ranks, balanced_N=as_few)
            for batch in loader.epoch(2, start):
                for image, label, row in zip(batch.inputs, batch.labels_B.tolist(), batch.rows_B.tolist(), strict=True):
                    assert label == labels[row]
                    assert (image == plain[row]).all()
                    rows.append(row)
        return rows

    plain = {
        int(row): image.clone()
        for batch in CacheLoader(cache.url, manifest, "train", 4).epoch(0)
        for image, row in zip(batch.inputs, batch.rows_B, strict=True)
    }
    whole = epoch()
    assert Counter(as_few[whole].tolist()).most_common()[-1][1] >= 7, "23 images, three classes"
    assert len(whole) == 23
    assert Counter(epoch(12)) == Counter(whole) - Counter(epoch_start(as_few, 12, manifest))


def epoch_start(labels: np.ndarray, end: int, manifest: object) -> list[int]:
    """Return the first rows of the same epoch."""
    split = manifest.splits["train"]  # type: ignore[attr-defined]  # a manifest
    loader_window = max(1, (256 << 20) // (split.rows_per_group * manifest.row_bytes) // 2)  # type: ignore[attr-defined]  # as above
    return epoch_order(split.rows, split.rows_per_group, loader_window, 1, 2, labels).rows[:end].tolist()
