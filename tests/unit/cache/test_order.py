"""The order of an epoch: known before anything is read, the same for any number of ranks."""

import random

import numpy as np
import pytest

from tasks.cache.order import Share, count_steps, epoch_order, share_of, window_sizes


def shares(rows: int, rows_per_group: int, batch_size: int, num_ranks: int, start: int = 0) -> list[Share]:
    """Return what every rank reads of one epoch."""
    order = epoch_order(rows, rows_per_group, 4, 7, 1)
    return [share_of(order, batch_size, rank, num_ranks, start) for rank in range(num_ranks)]


def test_order_is_a_permutation_that_seed_and_epoch_draw() -> None:
    """Every row is in it once; another seed or epoch is another order, the same ones are the same."""
    orders = {
        (seed, epoch): tuple(epoch_order(100, 7, 3, seed, epoch).rows.tolist()) for seed in (1, 2) for epoch in (0, 1)
    }

    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len(set(orders.values())) == 4
    assert tuple(epoch_order(100, 7, 3, 1, 0).rows.tolist()) == orders[1, 0]


def test_without_a_seed_the_order_is_that_of_the_rows() -> None:
    """Validation needs no shuffling."""
    assert epoch_order(10, 3, 4, None, 5).rows.tolist() == list(range(10))


def test_windows_begin_small_and_cover_all() -> None:
    """The first batch waits for an eighth of a window only."""
    assert window_sizes(100, 32) == [4, 8, 16, 32, 32, 8]
    assert window_sizes(3, 1000) == [3]
    assert window_sizes(3, 1) == [1, 1, 1]


def test_rows_of_a_window_are_those_of_its_row_groups() -> None:
    """No row is drawn before its row group: what is held is bounded."""
    order = epoch_order(1000, 5, 16, 3, 0)

    places = order.group_places[order.rows // 5]
    begin = 0
    for size in window_sizes(200, 16):
        in_window = places[5 * begin : 5 * (begin + size)]
        assert sorted(set(in_window.tolist())) == list(range(begin, begin + size))
        begin += size


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_steps_hold_the_same_images_on_any_number_of_ranks(num_ranks: int) -> None:
    """Step s of R ranks with batches of B is the order from s R B on: which rank has which changes no gradient."""
    rows = epoch_order(500, 6, 4, 7, 1).rows
    parts = shares(500, 6, 5, num_ranks)

    for step in range(parts[0].num_steps):
        of_ranks = [part.rows[step * 5 : step * 5 + part.count(step)] for part in parts]
        expected = rows[step * 5 * num_ranks : (step + 1) * 5 * num_ranks]
        assert sorted(np.concatenate(of_ranks).tolist()) == sorted(expected.tolist())


def test_a_rank_reads_its_part_of_the_row_groups() -> None:
    """Of 4 ranks each reads a quarter of the row groups and those about its edges, not some rows of each."""
    order = epoch_order(40_000, 20, 200, 7, 1)
    read = [len(share_of(order, 32, rank, 4).groups) for rank in range(4)]

    assert all(number < 0.6 * 2000 for number in read)


def test_any_shape_ranks_and_start_give_every_row_once() -> None:
    """For 300 drawn cases: every row of the rest once over the ranks, equal steps, and each part is as it says."""
    draw = random.Random(1)
    for _ in range(300):
        rows, rows_per_group = draw.randint(1, 90), draw.randint(1, 12)
        num_ranks, batch_size = draw.randint(1, 9), draw.randint(1, 20)
        start = draw.randint(0, rows)
        expected = epoch_order(rows, rows_per_group, 4, 7, 1).rows[start:]
        parts = shares(rows, rows_per_group, batch_size, num_ranks, start)

        assert sorted(row for part in parts for row in part.rows.tolist()) == sorted(expected.tolist())
        assert {part.num_steps for part in parts} == {count_steps(rows - start, batch_size, num_ranks)}
        for part in parts:
            assert sum(part.count(step) for step in range(part.num_steps)) == len(part.rows)
            assert sorted(part.images.tolist()) == list(range(len(part.rows)))
            check_reading(part, rows_per_group)


def check_reading(part: Share, rows_per_group: int) -> None:
    """Read the row groups one after the other, and find each step whole exactly when it is said to be."""
    read: set[int] = set()
    whole = [
        set(range(step * part.batch_size, step * part.batch_size + part.count(step))) for step in range(part.num_steps)
    ]
    assert [step for step in range(part.num_steps) if not whole[step]] == [
        step for step in range(part.num_steps) if part.whole_after[step] == 0
    ]
    for number, group in enumerate(part.groups.tolist(), start=1):
        images = part.images[part.bounds[number - 1] : part.bounds[number]]
        assert set((part.rows[images] // rows_per_group).tolist()) == {group}
        assert (np.diff(part.rows[images]) > 0).all()
        before = [wanted <= read for wanted in whole]
        read |= set(images.tolist())
        after = [wanted <= read for wanted in whole]
        for step in range(part.num_steps):
            if after[step] and not before[step]:
                assert part.whole_after[step] == number
