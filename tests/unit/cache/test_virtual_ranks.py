"""Virtual ranks: each belongs to one rank, and all ranks take the same number of batches."""

import pytest

from tasks.cache.order import VirtualRanks


@pytest.mark.parametrize("num_virtual", range(1, 10))
def test_each_virtual_rank_has_one_holder(num_virtual: int) -> None:
    """Ranks hold adjacent virtual ranks, and their numbers differ by one at most."""
    for num_ranks in range(1, num_virtual + 1):
        held = [VirtualRanks(rank, num_ranks, num_virtual).own for rank in range(num_ranks)]
        assert [virtual for own in held for virtual in own] == list(range(num_virtual))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        holders = [VirtualRanks(0, num_ranks, num_virtual).holder(virtual) for virtual in range(num_virtual)]
        assert [held[rank][0] <= virtual <= held[rank][-1] for virtual, rank in enumerate(holders)] == [True] * len(
            holders
        )


def test_rank_with_fewer_virtual_ranks_begins_with_an_empty_batch() -> None:
    """Five virtual ranks on three ranks take two turns, and the last batch of a turn always has images."""
    turns = [[VirtualRanks(rank, 3, 5).at(turn) for turn in range(2)] for rank in range(3)]
    assert VirtualRanks(0, 3, 5).num_turns == 2
    assert turns == [[None, 0], [1, 2], [3, 4]]


def test_without_a_loss_each_rank_is_its_own_virtual_rank() -> None:
    """One turn, and no empty batch."""
    assert [VirtualRanks.of(rank, 4).at(0) for rank in range(4)] == [0, 1, 2, 3]
    assert VirtualRanks.of(2, 4).num_turns == 1
