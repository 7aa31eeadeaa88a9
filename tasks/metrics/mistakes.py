"""The worst mistakes on a split: the images a model was most surely wrong about, found over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasks.collectives import Reducer
from tasks.text.printable import printable

NUM_MISTAKES = 24
"""Images of a gallery that a person still looks at one by one."""


@dataclass(frozen=True)
class Mistake:
    """One image that was classified wrongly."""

    row: int
    """Number of its row in the split."""
    true: int
    """Index of the true class."""
    predicted: int
    """Index of the most probable class."""
    probability: float
    """Of the predicted class, 0-1."""
    true_probability: float
    """Of the true class, 0-1."""
    loss: float
    """Cross-entropy, nats."""


class WorstMistakes:
    """Collects the mistakes of a rank with the highest loss, NUM_MISTAKES at most."""

    def __init__(self) -> None:
        self._worst = torch.empty((0, 6), dtype=torch.float64)

    def add(
        self,
        rows_B: torch.Tensor,
        labels_B: torch.Tensor,
        predicted_B: torch.Tensor,
        log_probabilities_BK: torch.Tensor,
    ) -> None:
        """Take in a batch: int64 rows, true and predicted classes, and float64 logarithms of probabilities."""
        of_true = log_probabilities_BK.gather(1, labels_B[:, None])[:, 0]
        of_predicted = log_probabilities_BK.gather(1, predicted_B[:, None])[:, 0]
        columns = [rows_B, labels_B, predicted_B, of_predicted.exp(), of_true.exp(), -of_true]
        seen = torch.stack([column.double() for column in columns], dim=1)
        self._worst = _worst(torch.cat([self._worst, seen[labels_B != predicted_B].cpu()]))

    def reduce(self, reducer: Reducer) -> tuple[Mistake, ...]:
        """Return the worst of all ranks, all of which call this, the worst first; of equal ones the first row."""
        # Each rank writes to a place of its own, the sum is what all wrote: ranks need nothing but sums to agree.
        # Rows are whole numbers far below 2^53, which float64 holds exactly; row -1 is a place that stayed empty.
        places = torch.zeros((reducer.num_ranks, NUM_MISTAKES, 6), dtype=torch.float64)
        places[reducer.rank, :, 0] = -1.0
        places[reducer.rank, : len(self._worst)] = self._worst
        gathered = reducer.sum(places).view(-1, 6)
        return tuple(
            Mistake(int(row), int(true), int(predicted), *rest)
            for row, true, predicted, *rest in _worst(gathered[gathered[:, 0] >= 0]).tolist()
        )


def _worst(mistakes: torch.Tensor) -> torch.Tensor:
    """Return the NUM_MISTAKES of highest loss, in the order of loss and row."""
    by_row = mistakes[mistakes[:, 0].argsort()]
    return by_row[by_row[:, 5].argsort(descending=True, stable=True)][:NUM_MISTAKES]


def mistake_table(
    mistakes: Sequence[Mistake], names: Sequence[str] | None, classes: Sequence[str]
) -> dict[str, list[object]]:
    """Return the mistakes as a table, columns by name.

    Args:
        mistakes: The worst first.
        names: The image of each mistake, as a file's path or its sha256; None where the tables cannot be read.
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
