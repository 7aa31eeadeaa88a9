"""The worst mistakes on a split over all ranks: the misclassified images with the highest loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasks.collectives.reducer import Reducer, gather_rows
from tasks.text.markup import printable

NUM_MISTAKES = 24
"""Number of mistakes that are kept: a gallery that a user can still inspect image by image."""


@dataclass(frozen=True)
class Mistake:
    """A misclassified image."""

    row: int
    """Row number in the split."""
    true: int
    """Index of the true class."""
    predicted: int
    """Index of the most probable class."""
    probability: float
    """Probability of the predicted class, 0-1."""
    true_probability: float
    """Probability of the true class, 0-1."""
    loss: float
    """Cross-entropy in nats."""


class WorstMistakes:
    """Accumulator of a rank's mistakes with the highest loss, at most NUM_MISTAKES."""

    def __init__(self) -> None:
        self._worst = torch.empty((0, 6), dtype=torch.float64)

    def add(
        self,
        rows_B: torch.Tensor,
        labels_B: torch.Tensor,
        predicted_B: torch.Tensor,
        log_probabilities_BK: torch.Tensor,
    ) -> None:
        """Add a batch: int64 rows, true and predicted classes, and float64 log-probabilities."""
        log_true_B = log_probabilities_BK.gather(1, labels_B[:, None])[:, 0]
        log_predicted_B = log_probabilities_BK.gather(1, predicted_B[:, None])[:, 0]
        columns = [rows_B, labels_B, predicted_B, log_predicted_B.exp(), log_true_B.exp(), -log_true_B]
        batch = torch.stack([column.double() for column in columns], dim=1)
        self._worst = _worst(torch.cat([self._worst, batch[labels_B != predicted_B].cpu()]))

    def reduce(self, reducer: Reducer) -> tuple[Mistake, ...]:
        """Return the worst mistakes of all ranks by descending loss, then by row; a collective operation."""
        # Row numbers are far below 2^53, which float64 represents exactly.
        worst = _worst(gather_rows(reducer, self._worst)).tolist()
        return tuple(Mistake(int(row), int(true), int(predicted), *rest) for row, true, predicted, *rest in worst)


def _worst(mistakes: torch.Tensor) -> torch.Tensor:
    """Return the NUM_MISTAKES mistakes of highest loss, by descending loss, then by row."""
    by_row = mistakes[mistakes[:, 0].argsort()]
    return by_row[by_row[:, 5].argsort(descending=True, stable=True)][:NUM_MISTAKES]


def mistake_table(
    mistakes: Sequence[Mistake], names: Sequence[str] | None, classes: Sequence[str]
) -> dict[str, list[object]]:
    """Return the mistakes as the columns of a table, by name.

    Args:
        mistakes: Mistakes, the worst first.
        names: Name of each mistake's image, a file's path or its sha256; None if the tables cannot be read.
        classes: Class names by index.
    """
    return {
        "image": list(map(printable, names)) if names is not None else [f"row {mistake.row}" for mistake in mistakes],
        "row": [mistake.row for mistake in mistakes],
        "true": [printable(classes[mistake.true]) for mistake in mistakes],
        "predicted": [printable(classes[mistake.predicted]) for mistake in mistakes],
        "probability": [mistake.probability for mistake in mistakes],
        "true_probability": [mistake.true_probability for mistake in mistakes],
        "loss": [mistake.loss for mistake in mistakes],
    }
