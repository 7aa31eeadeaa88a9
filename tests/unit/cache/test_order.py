"""The order of an epoch: determined before any row is read, and the same for any number of ranks."""

import random

import numpy as np
import pytest

from tasks.cache.order import Share, VirtualRanks, count_images, count_turns, epoch_order, share_of, window_sizes


def shares(
    rows: int, rows_per_group: int, batch_size: int, num_ranks: int, start: int = 0, num_virtual: int | None = None
) -> list[Share]:
    """Return the share of each rank of one epoch."""
    order = epoch_order(rows, rows_per_group, 4, 7, 1)
    parts = [VirtualRanks.of(rank, num_ranks, num_virtual) for rank in range(num_ranks)]
    return [share_of(order, batch_size, part, start) for part in parts]


def batches_of(share: Share) -> list[list[int]]:
    """Return the rows of each batch of a share."""
    return [share.rows[share.images_of(number)].tolist() for number in range(share.num_batches)]


def test_order_is_a_permutation_determined_by_seed_and_epoch() -> None:
    """Every row occurs once, and the order differs between seeds and epochs but not between calls."""
    orders = {
        (seed, epoch): tuple(epoch_order(100, 7, 3, seed, epoch).rows.tolist()) for seed in (1, 2) for epoch in (0, 1)
    }

    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len(set(orders.values())) == 4
    assert tuple(epoch_order(100, 7, 3, 1, 0).rows.tolist()) == orders[1, 0]


def test_order_without_a_seed_is_that_of_the_rows() -> None:
    """Without a seed, as in validation, rows are not shuffled."""
    assert epoch_order(10, 3, 4, None, 5).rows.tolist() == list(range(10))


def test_windows_grow_and_cover_all_row_groups() -> None:
    """The first window is an eighth of the full size, so that the first batch is early, and the sizes sum up."""
    assert window_sizes(100, 32) == [4, 8, 16, 32, 32, 8]
    assert window_sizes(3, 1000) == [3]
    assert window_sizes(3, 1) == [1, 1, 1]


def test_window_has_the_rows_of_its_row_groups() -> None:
    """The rows of a window are those of its row groups, which bounds the memory."""
    order = epoch_order(1000, 5, 16, 3, 0)

    places = order.group_places[order.rows // 5]
    begin = 0
    for size in window_sizes(200, 16):
        in_window = places[5 * begin : 5 * (begin + size)]
        assert sorted(set(in_window.tolist())) == list(range(begin, begin + size))
        begin += size


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_steps_have_the_same_images_on_any_number_of_ranks(num_ranks: int) -> None:
    """Step s of R ranks with batch size B has the R * B rows of the order from s * R * B, in any sharding."""
    rows = epoch_order(500, 6, 4, 7, 1).rows
    parts = shares(500, 6, 5, num_ranks)

    for step in range(parts[0].num_batches):
        of_ranks = [part.rows[part.images_of(step)] for part in parts]
        expected = rows[step * 5 * num_ranks : (step + 1) * 5 * num_ranks]
        assert sorted(np.concatenate(of_ranks).tolist()) == sorted(expected.tolist())


def test_rank_reads_its_share_of_the_row_groups() -> None:
    """Each of 4 ranks reads about a quarter of the row groups, not some rows of each."""
    order = epoch_order(40_000, 20, 200, 7, 1)
    read = [len(share_of(order, 32, VirtualRanks.of(rank, 4)).groups) for rank in range(4)]

    assert all(number < 0.6 * 2000 for number in read)


def test_every_row_is_read_once_for_any_shape_ranks_and_start() -> None:
    """For 300 random cases, every remaining row is read once over all ranks, in an equal number of steps."""
    draw = random.Random(1)
    for _ in range(300):
        rows, rows_per_group = draw.randint(1, 90), draw.randint(1, 12)
        num_ranks, batch_size = draw.randint(1, 9), draw.randint(1, 20)
        start = draw.randint(0, rows)
        expected = epoch_order(rows, rows_per_group, 4, 7, 1).rows[start:]
        parts = shares(rows, rows_per_group, batch_size, num_ranks, start)

        assert sorted(row for part in parts for row in part.rows.tolist()) == sorted(expected.tolist())
        assert {part.num_batches for part in parts} == {count_turns(rows - start, batch_size, num_ranks)}
        for part in parts:
            assert part.begins[0] == 0
            assert part.begins[-1] == len(part.rows)
            assert (np.diff(part.begins) >= 0).all()
            assert sorted(part.images.tolist()) == list(range(len(part.rows)))
            check_reading(part, rows_per_group)


def check_reading(part: Share, rows_per_group: int) -> None:
    """Check that each step is complete after exactly the number of row groups that the share gives."""
    read: set[int] = set()
    steps = [set(range(part.begins[step], part.begins[step + 1])) for step in range(part.num_batches)]
    assert [step for step in range(part.num_batches) if not steps[step]] == [
        step for step in range(part.num_batches) if part.whole_after[step] == 0
    ]
    for number, group in enumerate(part.groups.tolist(), start=1):
        images = part.images[part.bounds[number - 1] : part.bounds[number]]
        assert set((part.rows[images] // rows_per_group).tolist()) == {group}
        assert (np.diff(part.rows[images]) > 0).all()
        before = [wanted <= read for wanted in steps]
        read |= set(images.tolist())
        after = [wanted <= read for wanted in steps]
        for step in range(part.num_batches):
            if after[step] and not before[step]:
                assert part.whole_after[step] == number


def test_batches_of_virtual_ranks_are_the_same_on_any_number_of_ranks() -> None:
    """For 300 random cases, fewer ranks have exactly the batches of the configured ones, after an empty one if any."""
    draw = random.Random(2)
    for _ in range(300):
        rows, rows_per_group = draw.randint(1, 200), draw.randint(1, 12)
        num_virtual, batch_size = draw.randint(1, 5), draw.randint(1, 20)
        num_ranks, start = draw.randint(1, num_virtual), draw.randint(0, rows)
        expected = [batches_of(share) for share in shares(rows, rows_per_group, batch_size, num_virtual, start)]

        parts = shares(rows, rows_per_group, batch_size, num_ranks, start, num_virtual)

        num_turns = count_turns(rows - start, batch_size, num_virtual)
        assert {part.num_batches for part in parts} == {num_turns * -(-num_virtual // num_ranks)}
        seen = set()
        for rank, part in enumerate(parts):
            check_reading(part, rows_per_group)
            ranks = VirtualRanks(rank, num_ranks, num_virtual)
            for number, batch in enumerate(batches_of(part)):
                turn, virtual = number // ranks.num_turns, ranks.at(number % ranks.num_turns)
                assert batch == ([] if virtual is None else expected[virtual][turn])
                if virtual is not None:
                    seen.add((virtual, turn))
        assert seen == {(virtual, turn) for virtual in range(num_virtual) for turn in range(num_turns)}
        for virtual in range(num_virtual):
            left = [rows - start - turn * batch_size * num_virtual for turn in range(num_turns)]
            counts = [count_images(images, batch_size, num_virtual, virtual) for images in left]
            assert counts == [len(batch) for batch in expected[virtual]]
