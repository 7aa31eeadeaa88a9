"""The order of an epoch: a function of seed and epoch alone, cut into steps and shared out to any number of ranks.

Row groups are drawn first, then the rows of a window of row groups are mixed, window after window. What the first p
images of an epoch are is therefore known without reading one, whatever the number of ranks: a position is one number.
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
    """At which place each row group is drawn, shape (row groups,)."""
    rows_per_group: int


@dataclass(frozen=True)
class Share:
    """What one rank reads of an epoch: its images are numbered from 0 in the order they leave the loader."""

    rows: Integers
    """Row number of each image, shape (images,)."""
    batch_size: int
    """Images of every step but the last."""
    num_steps: int
    groups: Integers
    """Row groups to read, in the order of reading."""
    bounds: Integers
    """Where the images of each row group begin in `images`, and the end of the last: shape (row groups + 1,)."""
    images: Integers
    """Numbers of the images by row group, within one by row: shape (images,)."""
    whole_after: Integers
    """How many row groups have to be read before a step is whole, shape (steps,)."""

    def count(self, step: int) -> int:
        """Return how many images the rank has in a step."""
        return max(0, min(self.batch_size, len(self.rows) - step * self.batch_size))


def window_sizes(num_groups: int, window: int) -> list[int]:
    """Return how many row groups are mixed at a time: few at first, for an early first batch, then `window`."""
    sizes, size = [], max(1, window // 8)
    while num_groups > 0:
        sizes.append(min(size, num_groups))
        num_groups -= sizes[-1]
        size = min(window, 2 * size)
    return sizes


def epoch_order(rows: int, rows_per_group: int, window: int, seed: int | None, epoch: int) -> EpochOrder:
    """Return the order of an epoch.

    Args:
        rows: Images of the split; row group g holds the rows from g * rows_per_group on.
        rows_per_group: Size of a row group.
        window: Row groups whose rows are mixed.
        seed: Draws the order; None keeps the order of the rows.
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
    """Return how many steps `rows` images are, the same on every rank."""
    return -(-rows // (batch_size * num_ranks))


def share_of(order: EpochOrder, batch_size: int, rank: int, num_ranks: int, start: int = 0) -> Share:
    """Return what one rank reads from position `start` of the epoch on.

    A step is the next batch_size * num_ranks images of the order, the last one what is left. Within a step, ranks
    take the images by the place of their row group, so that a rank reads about 1 / num_ranks of the row groups and
    not some rows of each; the images of a step, and so its gradient, are the same ones however they are shared.
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
    # By image the number of row groups up to its own; a step needs the most of its images.
    needed = np.empty(len(left), dtype=np.int64)
    needed[images] = np.repeat(np.arange(1, len(groups) + 1), np.diff(bounds))
    whole_after = np.zeros(num_steps, dtype=np.int64)
    np.maximum.at(whole_after, np.arange(len(left)) // batch_size, needed)
    return Share(left, batch_size, num_steps, groups, bounds, images, whole_after)


def _runs(values: Integers) -> tuple[Integers, Integers]:
    """Return the value of each run of equal ones, and where the runs begin and the last ends."""
    if not len(values):
        return values, np.zeros(1, dtype=np.int64)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
    return values[begins], np.append(begins, len(values))
