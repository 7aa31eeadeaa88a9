"""Differences between two precisions, on networks whose outputs are known."""

import pytest
import torch
from torch import nn

from tasks.collectives.reducer import Reducer
from tasks.metrics import evaluate
from tasks.metrics.evaluate import PrecisionDifference, compare_precisions
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import CPU, TensorLoader

SERVED = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.1, 0.0]], dtype=torch.float64)
EXACT = torch.tensor([[1.0, 0.0], [0.0, 1.2], [2.0, 0.0], [0.0, 0.1]], dtype=torch.float64)
LABELS = torch.zeros(4, dtype=torch.int64)


class Looked(nn.Module):
    """A network whose logits are the rows of a table, by the row numbers of the inputs."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rows."""
        return self.logits[rows[:, 0].long()]


def loader(steps: list[list[int]]) -> TensorLoader:
    """Return a loader of row numbers."""
    return TensorLoader(torch.arange(4, dtype=torch.float64)[:, None], LABELS, steps)


def expected() -> PrecisionDifference:
    """Return the differences of SERVED and EXACT, calculated image by image."""
    gaps = []
    for served, exact in zip(SERVED, EXACT, strict=True):
        label = int(served.argmax())
        gaps.append(float((served.softmax(0)[label] - exact.softmax(0)[label]).abs()))
    return PrecisionDifference(images=4, mean=sum(gaps) / 4, largest=max(gaps), changed_labels=1)


def test_differences_are_those_of_the_served_labels() -> None:
    """The probability of the served label is compared, and a label that differs is counted."""
    found = compare_precisions(Looked(SERVED), Looked(EXACT), loader([[0, 1], [], [2, 3]]), CPU, Reducer())

    assert found == pytest.approx(expected())


def test_ranks_find_the_same_differences() -> None:
    """Two ranks have the figures of a single process."""

    def of_rank(reducer: ThreadReducer) -> PrecisionDifference:
        steps = [[[0, 1]], [[2], [3]]][reducer.rank]
        return compare_precisions(Looked(SERVED), Looked(EXACT), loader(steps), CPU, reducer)

    assert ThreadRanks(2).run(of_rank) == [pytest.approx(expected())] * 2


def test_only_the_first_images_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison ends with the batch in which the limit is reached."""
    monkeypatch.setattr(evaluate, "MAX_IMAGES", 2)

    found = compare_precisions(Looked(SERVED), Looked(EXACT), loader([[0], [1], [2, 3]]), CPU, Reducer())

    assert (found.images, found.changed_labels) == (2, 0)
