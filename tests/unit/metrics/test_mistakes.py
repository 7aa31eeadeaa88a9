"""The worst mistakes, found from given probabilities."""

import math
from collections.abc import Sequence

import pytest
import torch

from tasks.collectives.reducer import Reducer
from tasks.metrics.mistakes import NUM_MISTAKES, Mistake, WorstMistakes, mistake_table
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer

Image = tuple[int, int, list[float]]
"""Row, true class, probabilities."""


def collect(images: Sequence[Image]) -> WorstMistakes:
    """Add the images as one batch."""
    mistakes = WorstMistakes()
    log_probabilities_BK = torch.tensor([image[2] for image in images], dtype=torch.float64).log()
    mistakes.add(
        torch.tensor([image[0] for image in images]),
        torch.tensor([image[1] for image in images]),
        log_probabilities_BK.argmax(1),
        log_probabilities_BK,
    )
    return mistakes


def many(rows: range) -> list[Image]:
    """Return images of class 0, all predicted as class 1, with increasing probability."""
    return [(row, 0, [0.4 / (row + 1), 1 - 0.4 / (row + 1)]) for row in rows]


def test_mistakes_are_sorted_by_loss() -> None:
    """Mistakes are sorted by descending loss, without the correctly classified images."""
    found = collect([(5, 0, [0.4, 0.6]), (6, 0, [0.9, 0.1]), (7, 1, [0.95, 0.05])]).reduce(Reducer())

    assert [mistake.row for mistake in found] == [7, 5]
    worst = found[0]
    assert (worst.true, worst.predicted) == (1, 0)
    assert worst.probability == pytest.approx(0.95)
    assert worst.true_probability == pytest.approx(0.05)
    assert worst.loss == pytest.approx(-math.log(0.05))


def test_worst_mistakes_over_all_batches_are_kept() -> None:
    """Mistakes of earlier batches are replaced by worse ones of later batches."""
    mistakes = WorstMistakes()
    for begin in range(0, 60, 7):
        images = many(range(begin, min(60, begin + 7)))
        log_probabilities_BK = torch.tensor([image[2] for image in images], dtype=torch.float64).log()
        rows_B = torch.tensor([image[0] for image in images])
        mistakes.add(rows_B, torch.zeros_like(rows_B), torch.ones_like(rows_B), log_probabilities_BK)

    assert [mistake.row for mistake in mistakes.reduce(Reducer())] == list(range(59, 59 - NUM_MISTAKES, -1))


def test_mistakes_of_equal_loss_are_sorted_by_row() -> None:
    """Mistakes of equal loss are sorted by row, for any order in which they were added."""
    images = [(row, 0, [0.25, 0.75]) for row in (9, 2, 30, 4)]

    assert [mistake.row for mistake in collect(images).reduce(Reducer())] == [2, 4, 9, 30]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_mistakes_on_ranks_equal_those_of_one_process(num_ranks: int) -> None:
    """All ranks return the mistakes of one process, including row 0, even if a rank has none."""
    images = many(range(40)) + [(row, 1, [0.1, 0.9]) for row in range(40, 60)]
    alone = collect(images).reduce(Reducer())

    def rank_main(reducer: ThreadReducer) -> tuple[Mistake, ...]:
        # Every rank but the last has a share of the mistakes; the last has the correctly classified images.
        wrong_ranks = max(1, num_ranks - 1)
        own = [image for image in images[:40] if image[0] % wrong_ranks == reducer.rank]
        if reducer.rank == num_ranks - 1:
            own += images[40:]
        return collect(own).reduce(reducer)

    assert ThreadRanks(num_ranks).run(rank_main) == [alone] * num_ranks


def test_ranks_without_mistakes_return_none() -> None:
    """Empty slots of the gathered mistakes are not returned."""
    right = [(0, 0, [0.9, 0.1])]

    assert ThreadRanks(2).run(lambda reducer: collect(right).reduce(reducer)) == [(), ()]


def test_table_names_images_and_classes() -> None:
    """An image is named by its file if it is known, else by its row."""
    found = collect([(5, 0, [0.4, 0.6]), (7, 1, [0.75, 0.25])]).reduce(Reducer())

    table = mistake_table(found, ["a/1.jpg", "b/2.jpg"], ["ant", "bee"])

    assert table["image"] == ["a/1.jpg", "b/2.jpg"]
    assert (table["true"], table["predicted"]) == (["bee", "ant"], ["ant", "bee"])
    assert table["probability"] == pytest.approx([0.75, 0.6])
    assert mistake_table(found, None, ["ant", "bee"])["image"] == ["row 7", "row 5"]
