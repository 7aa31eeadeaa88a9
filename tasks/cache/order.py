"""The order of an epoch: a function of seed and epoch, split into steps and sharded over any number of ranks.

Row groups are shuffled first, then the rows within each window of row groups. The first p images of an epoch are
therefore known before any is read, for any number of ranks: a position is a single number.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a training run, and this rank's part of them.

    A run that has lost ranks continues with fewer. Each takes the batches of one or more virtual ranks and accumulates
    their gradients. Batches, images per step and random numbers stay as they were. Or et al., "VirtualFlow" (2022,
    section 3), call them virtual nodes. Without a loss each rank is its own virtual rank.

    All ranks take the same number of batches. A rank with fewer virtual ranks than others begins with an empty batch.
    So the last batch of a step, whose backward pass averages the gradients, has images.
    """

    rank: int = 0
    """This rank."""
    num_ranks: int = 1
    """Number of ranks that run."""
    num_virtual: int = 1
    """Number of virtual ranks, `distributed.num_ranks`; at least that of the ranks."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.num_ranks <= self.num_virtual, f"{self} is not a part of the virtual ranks"

    @classmethod
    def of(cls, rank: int, num_ranks: int, num_virtual: int | None = None) -> "VirtualRanks":
        """Return a rank's part; without `num_virtual`, each rank is its own virtual rank."""
        return cls(rank, num_ranks, num_ranks if num_virtual is None else num_virtual)

    @property
    def num_turns(self) -> int:
        """Number of turns in which all virtual ranks have had a batch; in each, a rank takes one batch."""
        return -(-self.num_virtual // self.num_ranks)

    def held_by(self, rank: int) -> range:
        """Return the virtual ranks of a rank; adjacent ones, since they read adjacent row groups."""
        begin, end = (self.num_virtual * number // self.num_ranks for number in (rank, rank + 1))
        return range(begin, end)

    @property
    def own(self) -> range:
        """The virtual ranks of this rank."""
        return self.held_by(self.rank)

    def holder(self, virtual: int) -> int:
        """Return the rank that has a virtual rank."""
        return ((virtual + 1) * self.num_ranks - 1) // self.num_virtual

    def at(self, turn: int, rank: int | None = None) -> int | None:
        """Return the virtual rank whose batch a rank takes in a turn, or None for an empty batch."""
        held = self.held_by(self.rank if rank is None else rank)
        number = turn - (self.num_turns - len(held))
        return held[number] if number >= 0 else None


@dataclass(frozen=True)
class EpochOrder:
    """All rows of a split in the order of one epoch."""

    rows: Integers
    """Row numbers, shape (rows of the split,)."""
    group_places: Integers
    """Position of each row group in the order of reading, shape (row groups,)."""
    rows_per_group: int


@dataclass(frozen=True)
class Share:
    """The images that one rank reads of an epoch, numbered from 0 in the order in which the loader yields them."""

    rows: Integers
    """Row number of each image, shape (images,)."""
    begins: Integers
    """Number of the first image of each batch, and the end of the last: shape (batches + 1,)."""
    groups: Integers
    """Row groups to read, in the order of reading."""
    bounds: Integers
    """Offset of each row group's images in `images`, and the end of the last: shape (row groups + 1,)."""
    images: Integers
    """Image numbers sorted by row group, then by row: shape (images,)."""
    whole_after: Integers
    """Number of row groups that have to be read before a batch is complete, shape (batches,)."""

    @property
    def num_batches(self) -> int:
        """Number of batches, the same on every rank."""
        return len(self.begins) - 1

    def images_of(self, batch: int) -> slice:
        """Return the numbers of the images of a batch."""
        return slice(int(self.begins[batch]), int(self.begins[batch + 1]))


def window_sizes(num_groups: int, window: int) -> list[int]:
    """Return the shuffle windows' sizes in row groups: small at first, for an early first batch, then `window`."""
    sizes, size = [], max(1, window // 8)
    while num_groups > 0:
        sizes.append(min(size, num_groups))
        num_groups -= sizes[-1]
        size = min(window, 2 * size)
    return sizes


MAX_REPEATS = 20
"""Maximum number of times that an image is repeated in an epoch: a row group's images are in memory together."""


def balanced_counts(labels_N: Integers, generator: np.random.Generator) -> Integers:
    """Return how often each image is in an epoch of N images, with the classes equally often: int64 (N,).

    It is a systematic sample (Madow and Madow, "On the Theory of Systematic Sampling", 1944): the numbers of the images
    of a class differ by at most 1. With MAX_REPEATS, classes of very few images are less often in the epoch.
    """
    sizes = np.bincount(labels_N)
    expected_N = 1.0 / sizes[labels_N]
    for _round in range(len(sizes)):  # What the limit takes from small classes goes to the others.
        expected_N = np.minimum(expected_N * len(labels_N) / expected_N.sum(), MAX_REPEATS)
    shuffled = generator.permutation(len(labels_N))
    shuffled = shuffled[np.argsort(labels_N[shuffled], kind="stable")]
    ends_N = np.cumsum(expected_N[shuffled])
    ends_N *= len(labels_N) / ends_N[-1]
    counts_N = np.empty(len(labels_N), dtype=np.int64)
    counts_N[shuffled] = np.diff(np.floor(ends_N + generator.random()), prepend=0)
    # The last end is a whole number up to rounding.
    counts_N[shuffled[-1]] += len(labels_N) - counts_N.sum()
    return counts_N


def epoch_order(
    rows: int, rows_per_group: int, window: int, seed: int | None, epoch: int, balanced_N: Integers | None = None
) -> EpochOrder:
    """Return the order of an epoch.

    Args:
        rows: Number of images of the split; row group g begins at row g * rows_per_group.
        rows_per_group: Number of rows per row group.
        window: Number of row groups whose rows are shuffled together.
        seed: Seed of the shuffling; None keeps the order of the rows.
        epoch: Number of the epoch.
        balanced_N: Labels of the rows, whose classes are then equally often in the epoch; None: each row once.
    """
    num_groups = -(-rows // rows_per_group)
    if seed is None:
        return EpochOrder(np.arange(rows), np.arange(num_groups), rows_per_group)
    generator = np.random.default_rng((seed, epoch))
    # Of a generator of its own: the order of the row groups is that of an epoch without balance.
    counts = None if balanced_N is None else balanced_counts(balanced_N, np.random.default_rng((seed, epoch, 1)))
    groups = generator.permutation(num_groups)
    ordered = []
    for drawn in np.split(groups, np.cumsum(window_sizes(num_groups, window))[:-1]):
        mixed = (drawn[:, None] * rows_per_group + np.arange(rows_per_group)).ravel()
        mixed = mixed[mixed < rows]
        ordered.append(generator.permutation(mixed if counts is None else np.repeat(mixed, counts[mixed])))
    places = np.empty(num_groups, dtype=np.int64)
    places[groups] = np.arange(num_groups)
    return EpochOrder(np.concatenate(ordered), places, rows_per_group)


def count_turns(rows: int, batch_size: int, num_virtual: int) -> int:
    """Return the number of batches of each virtual rank for `rows` images, the same on every rank."""
    return -(-rows // (batch_size * num_virtual))


def count_images(rows: int, batch_size: int, num_virtual: int, virtual: int) -> int:
    """Return the number of images of a virtual rank in a batch, of the `rows` images that remain before it."""
    rows = min(rows, batch_size * num_virtual)
    return rows * (virtual + 1) // num_virtual - rows * virtual // num_virtual


def share_of(order: EpochOrder, batch_size: int, ranks: VirtualRanks, start: int = 0) -> Share:
    """Return the images that one rank reads of the epoch from position `start`.

    The virtual ranks have a batch each of the next batch_size * num_virtual images of the order; the last ones have the
    remaining images. Within them, images are sharded in the order of their row groups: a virtual rank reads about
    1 / num_virtual of the row groups, not some rows of each. The batches of the virtual ranks do not depend on the
    number of ranks, and the images of all of them not on the sharding.
    """
    left = order.rows[start:]
    num_virtual, own = ranks.num_virtual, ranks.own
    num_turns = count_turns(len(left), batch_size, num_virtual)
    if num_virtual > 1:
        left = _own_images(order, left, batch_size, ranks)
    last = len(order.rows) - start - (num_turns - 1) * batch_size * num_virtual
    counts = np.zeros((num_turns, ranks.num_turns), dtype=np.int64)
    counts[:, ranks.num_turns - len(own) :] = batch_size
    if num_turns:
        counts[-1, ranks.num_turns - len(own) :] = [count_images(last, batch_size, num_virtual, each) for each in own]
    begins = np.concatenate([[0], np.cumsum(counts)])
    places = order.group_places[left // order.rows_per_group]
    images = np.lexsort((left, places))
    firsts = np.unique(places[images], return_index=True)[1]  # of each row group's images
    groups, bounds = left[images[firsts]] // order.rows_per_group, np.append(firsts, len(images))
    # Per image: the number of row groups read when its own is read. A batch needs the maximum over its images.
    needed = np.empty(len(left), dtype=np.int64)
    needed[images] = np.repeat(np.arange(1, len(groups) + 1), np.diff(bounds))
    whole_after = np.zeros(counts.size, dtype=np.int64)
    np.maximum.at(whole_after, np.repeat(np.arange(counts.size), counts.ravel()), needed)
    return Share(left, begins, groups, bounds, images, whole_after)


def _own_images(order: EpochOrder, left: Integers, batch_size: int, ranks: VirtualRanks) -> Integers:
    """Return the rows of a rank's batches, in the order of the batches."""
    num_virtual, own = ranks.num_virtual, ranks.own
    places = order.group_places[left // order.rows_per_group]
    full = len(left) // (batch_size * num_virtual)
    cut = full * batch_size * num_virtual
    turns = np.argsort(places[:cut].reshape(full, batch_size * num_virtual), axis=1, kind="stable")
    batches = turns[:, own.start * batch_size : own.stop * batch_size].reshape(full, len(own), batch_size)
    mine = np.sort(batches, axis=2).reshape(full, len(own) * batch_size)
    last = np.argsort(places[cut:], kind="stable")
    begins = [len(last) * number // num_virtual for number in (*own, own.stop)]
    rest = [np.sort(last[begin:end]) for begin, end in itertools.pairwise(begins)]
    return np.concatenate(
        [np.take_along_axis(left[:cut].reshape(turns.shape), mine, axis=1).ravel(), left[cut:][np.concatenate(rest)]]
    )
