"""Exponential moving average of the trained weights, which is validated in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Moving average of a model's trained weights over the steps of a phase, with exponential weights.

    Batch norm's statistics are those of the model, as by default in torch's AveragedModel.
    """

    def __init__(self, model: nn.Module, decay: float, average: dict[str, torch.Tensor]) -> None:
        """Start with the model's weights, or with an average that was restored.

        Args:
            model: The trained model.
            decay: Share of the average that a step keeps, once many steps were taken.
            average: The average by parameter name, updated in place for checkpoints; empty at the start of a phase.
        """
        self._decay = decay
        self._weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        for name, value in self._weights.items():
            average[name] = average.get(name, value).detach().to(value.device, copy=True)
        self._average = average

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights after a step.

        Args:
            step: Number of the step in its phase, from 0. The first steps keep less of the initial weights, as in
                TensorFlow's ExponentialMovingAverage with `num_updates`.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        weights = [self._weights[name].detach() for name in self._average]
        torch._foreach_lerp_(list(self._average.values()), weights, 1.0 - decay)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights, and its own ones back at the end, in every bit."""
        own = {name: value.detach().clone() for name, value in self._weights.items()}
        try:
            for name, value in self._weights.items():
                value.copy_(self._average[name])
            yield
        finally:
            for name, value in self._weights.items():
                value.copy_(own[name])
