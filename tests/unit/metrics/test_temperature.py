"""The temperature that calibrates probabilities, compared with known ones."""

import pytest
import torch
from torch.nn import functional

from tasks.collectives.reducer import Reducer
from tasks.metrics.calibration import MAX_TEMPERATURE, MIN_TEMPERATURE, TemperatureSums
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer

CPU = torch.device("cpu")


def sampled(num_images: int, num_classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of noise, and labels that are drawn with their probabilities."""
    generator = torch.Generator().manual_seed(5)
    logits_BK = 2 * torch.randn(num_images, num_classes, generator=generator)
    labels_B = torch.multinomial(torch.softmax(logits_BK, dim=1), 1, generator=generator)[:, 0]
    return labels_B, logits_BK


def fitted(labels_B: torch.Tensor, logits_BK: torch.Tensor) -> float:
    """Return the temperature of labels and logits that are added in batches of 100."""
    sums = TemperatureSums(CPU)
    for labels, logits in zip(labels_B.split(100), logits_BK.split(100), strict=True):
        sums.add(labels, logits)
    return sums.reduce(Reducer())


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_temperature_undoes_a_factor_of_the_logits(factor: float) -> None:
    """Logits that are `factor` times those of the true probabilities have it as their temperature."""
    labels_B, logits_BK = sampled(20_000)

    assert fitted(labels_B, factor * logits_BK) == pytest.approx(factor, rel=0.03)


def test_temperature_has_the_lowest_loss() -> None:
    """No other temperature near it has a lower cross-entropy."""
    labels_B, logits_BK = sampled(2_000)
    found = fitted(labels_B, 2.2 * logits_BK)

    losses = {
        factor: float(functional.cross_entropy(2.2 * logits_BK.double() / (found * factor), labels_B))
        for factor in (0.97, 0.99, 1.0, 1.01, 1.03)
    }
    assert min(losses, key=losses.__getitem__) == 1.0


def test_model_without_mistakes_keeps_a_finite_temperature() -> None:
    """With few images that are all right the likelihood has no maximum; more of them allow a lower temperature."""
    logits_BK = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0]])
    labels_B = torch.arange(3)

    few, many = fitted(labels_B, logits_BK), fitted(labels_B.repeat(100), logits_BK.repeat(100, 1))

    assert MIN_TEMPERATURE < many < few < MAX_TEMPERATURE
    # The target of the true class is 1 - 1/5 with three images, and both others share the rest.
    assert float(torch.softmax(logits_BK[0] / few, dim=0)[0]) == pytest.approx(0.8, abs=0.001)


def test_useless_logits_have_the_highest_temperature() -> None:
    """Logits that are wrong for every image are flattened as far as possible, and no images change nothing."""
    labels_B = torch.zeros(50, dtype=torch.int64)
    logits_BK = torch.tensor([[-1.0, 4.0]]).repeat(50, 1)

    assert fitted(labels_B, logits_BK) == MAX_TEMPERATURE
    assert TemperatureSums(CPU).reduce(Reducer()) == 1.0


def test_ranks_find_the_same_temperature() -> None:
    """Three ranks with shares of different sizes have the temperature of a single process."""
    labels_B, logits_BK = sampled(500)

    def of_rank(reducer: ThreadReducer) -> float:
        sums = TemperatureSums(CPU)
        begin, end = ((0, 100), (100, 101), (101, 500))[reducer.rank]
        sums.add(labels_B[begin:end], 1.7 * logits_BK[begin:end])
        return sums.reduce(reducer)

    assert ThreadRanks(3).run(of_rank) == [fitted(labels_B, 1.7 * logits_BK)] * 3
