"""The order of an epoch: a function of seed and epoch, split into steps and sharded over any number of ranks.

Row groups are shuffled first, then the rows within each window of row groups. The first p images of an epoch are
therefore known before any is read, for any number of ranks: a position is a single number.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


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
    batch_size: int
    """Number of images in every step but the last."""
    num_steps: int
    groups: Integers
    """Row groups to read, in the order of reading."""
    bounds: Integers
    """Offset of each row group's images in `images`, and the end of the last: shape (row groups + 1,)."""
    images: Integers
    """Image numbers sorted by row group, then by row: shape (images,)."""
    whole_after: Integers
    """Number of row groups that have to be read before a step is complete, shape (steps,)."""

    def count(self, step: int) -> int:
        """Return the number of images of the rank in a step."""
        return max(0, min(self.batch_size, len(self.rows) - step * self.batch_size))


def window_sizes(num_groups: int, window: int) -> list[int]:
    """Return the shuffle windows' sizes in row groups: small at first, for an early first batch, then `window`."""
    sizes, size = [], max(1, window // 8)
    while num_groups > 0:
        sizes.append(min(size, num_groups))
        num_groups -= sizes[-1]
        size = min(window, 2 * size)
    return sizes


def epoch_order(rows: int, rows_per_group: int, window: int, seed: int | None, epoch: int) -> EpochOrder:
    """Return the order of an epoch.

    Args:
        rows: Number of images of the split; row group g begins at row g * rows_per_group.
        rows_per_group: Number of rows per row group.
        window: Number of row groups whose rows are shuffled together.
        seed: Seed of the shuffling; None keeps the order of the rows.
        epoch: Number of the epoch.
    """
    num_groups = -(-rows // rows_per_group)
    if seed is None:
        return EpochOrder(np.arange(rows), np.arange(num_groups), rows_per_group)
    generator = np.random.default_rng((seed, epoch))
    groups = generator.permutation(num_groups)
    ordered, begin = [], 0
    for size in window_sizes(num_groups, window):
        drawn = groups[begin : begin + size]
        mixed = (drawn[:, None] * rows_per_group + np.arange(rows_per_group)).ravel()
        ordered.append(generator.permutation(mixed[mixed < rows]))
        begin += size
    places = np.empty(num_groups, dtype=np.int64)
    places[groups] = np.arange(num_groups)
    return EpochOrder(np.concatenate(ordered), places, rows_per_group)


def count_steps(rows: int, batch_size: int, num_ranks: int) -> int:
    """Return the number of steps for `rows` images, the same on every rank."""
    return -(-rows // (batch_size * num_ranks))


def share_of(order: EpochOrder, batch_size: int, rank: int, num_ranks: int, start: int = 0) -> Share:
    """Return the images that one rank reads of the epoch from position `start`.

    A step is the next batch_size * num_ranks images of the order; the last step has the remaining ones. Within a step,
    images are sharded in the order of their row groups: a rank reads about 1 / num_ranks of the row groups, not some
    rows of each. The images of a step, and so its gradient, do not depend on the sharding.
    """
    left = order.rows[start:]
    num_steps = count_steps(len(left), batch_size, num_ranks)
    if num_ranks > 1:
        places = order.group_places[left // order.rows_per_group]
        full = len(left) // (batch_size * num_ranks)
        cut = full * batch_size * num_ranks
        steps = np.argsort(places[:cut].reshape(full, batch_size * num_ranks), axis=1, kind="stable")
        mine = np.sort(steps[:, rank * batch_size : (rank + 1) * batch_size], axis=1)
        last = np.argsort(places[cut:], kind="stable")
        begin, end = (len(last) * number // num_ranks for number in (rank, rank + 1))
        left = np.concatenate(
            [
                np.take_along_axis(left[:cut].reshape(steps.shape), mine, axis=1).ravel(),
                left[cut:][np.sort(last[begin:end])],
            ]
        )
    places = order.group_places[left // order.rows_per_group]
    images = np.lexsort((left, places))
    groups, bounds = _runs(left[images] // order.rows_per_group)
    # Per image: the number of row groups read when its own is read. A step needs the maximum over its images.
    needed = np.empty(len(left), dtype=np.int64)
    needed[images] = np.repeat(np.arange(1, len(groups) + 1), np.diff(bounds))
    whole_after = np.zeros(num_steps, dtype=np.int64)
    np.maximum.at(whole_after, np.arange(len(left)) // batch_size, needed)
    return Share(left, batch_size, num_steps, groups, bounds, images, whole_after)


def _runs(values: Integers) -> tuple[Integers, Integers]:
    """Return the value of each run of equal values, the offsets of the runs, and the end of the last."""
    if not len(values):
        return values, np.zeros(1, dtype=np.int64)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
    return values[begins], np.append(begins, len(values))
