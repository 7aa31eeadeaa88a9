"""Check gradients: every trained parameter gets a finite, non-zero gradient."""

import logging

import torch

from tasks.config.sanity import GradientConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, join_names
from tasks.refs import CacheRef, GradientReport, ParameterGradient
from tasks.sanity.first_batches import first_batches
from tasks.train.non_finite import WAY_OUT
from tasks.train.phases import phases_of

logger = logging.getLogger("lakevision.sanity")

NUM_NAMED = 8
"""Maximum number of parameters in the error; the report has all of them."""


def measure_gradients(train: TrainConfig, cache: CacheRef, gradients: GradientConfig) -> GradientReport:
    """Train on the first batches as in the last phase, and return the gradient norms of all trained parameters.

    The last phase trains the most layers: each phase of `train.fine_tune` unfreezes more than the one before.

    Args:
        train: Model, optimizer, learning rate, precision, batch size and seed of the training run.
        cache: Cache of the images.
        gradients: Number of batches.

    Raises:
        WrongInput: As `first_batches`.
    """
    setup = first_batches(train, phases_of(train)[-1], cache, gradients.num_batches)
    trained = {name: value for name, value in setup.classifier.named_parameters() if value.requires_grad}
    norms: dict[str, list[float]] = {name: [] for name in trained}
    for batch in range(len(setup.batches)):
        setup.optimizer.zero_grad()
        setup.loss(batch).backward()  # type: ignore[no-untyped-call]  # torch does not type backward
        for name, value in trained.items():
            if value.grad is not None:
                norms[name].append(float(torch.linalg.vector_norm(value.grad.double())))
        setup.clip_gradients(train.max_gradient_norm)
        setup.optimizer.step()
    measured = [
        ParameterGradient(
            name=name,
            elements=value.numel(),
            # Python's max of a list with NaN depends on its order.
            norm=max((norm for norm in norms[name] if norm == norm), default=None),  # noqa: PLR0124  # NaN differs from itself
            finite=all(torch.tensor(norms[name]).isfinite().tolist()),
        )
        for name, value in trained.items()
    ]
    logger.info("%d trained parameters, %d without a gradient", len(measured), len(without_gradient(measured)))
    return GradientReport(parameters=measured, batches=len(setup.batches))


def without_gradient(parameters: list[ParameterGradient]) -> list[str]:
    """Return the names of the parameters whose gradient is missing or zero in every batch."""
    return [parameter.name for parameter in parameters if parameter.finite and not parameter.norm]


def not_finite(parameters: list[ParameterGradient]) -> list[str]:
    """Return the names of the parameters with a non-finite gradient."""
    return [parameter.name for parameter in parameters if not parameter.finite]


def _shown(names: list[str]) -> str:
    return join_names(names[:NUM_NAMED], len(names))


def check_gradients(report: GradientReport) -> None:
    """Raise an error if a trained parameter has no gradient or a non-finite one.

    Raises:
        WrongInput: Lists the parameters and the likely cause.
    """
    total = len(report.parameters)
    if names := not_finite(report.parameters):
        raise WrongInput(
            f"the gradients of {len(names)} of {total} parameters are non-finite ({_shown(names)}): {WAY_OUT}"
        )
    if names := without_gradient(report.parameters):
        raise WrongInput(
            f"{len(names)} of {total} trained parameters got no gradient in {report.batches} batches "
            f"({_shown(names)}): the loss does not depend on them; freeze them, or choose another train.model"
        )
