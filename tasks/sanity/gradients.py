"""Check gradients: every parameter that is trained gets one, which is a number and not zero."""

import logging

import torch

from tasks.config.sanity import GradientConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, listed
from tasks.refs import CacheRef, GradientReport, ParameterGradient
from tasks.sanity.first_batches import first_batches
from tasks.train.non_finite import WAY_OUT
from tasks.train.phases import phases_of

logger = logging.getLogger("lakevision.sanity")

NUM_NAMED = 8
"""Parameters that the error names; all of them are in the report."""


def measure_gradients(train: TrainConfig, cache: CacheRef, gradients: GradientConfig) -> GradientReport:
    """Train on the first batches as the last phase does, and return what gradient each trained parameter got.

    In the last one, since each phase of `train.fine_tune` lets more layers learn than the one before it.

    Args:
        train: Model, optimizer, learning rate, precision, batch size and seed, as a training has them.
        cache: Where the images come from.
        gradients: How many batches.

    Raises:
        WrongInput: As `first_batches`.
    """
    few = first_batches(train, phases_of(train)[-1], cache, gradients.num_batches)
    trained = {name: value for name, value in few.classifier.named_parameters() if value.requires_grad}
    norms: dict[str, list[float]] = {name: [] for name in trained}
    for batch in range(len(few.batches)):
        few.optimizer.zero_grad()
        few.loss(batch).backward()  # type: ignore[no-untyped-call]
        for name, value in trained.items():
            if value.grad is not None:
                norms[name].append(float(torch.linalg.vector_norm(value.grad.double())))
        few.bound_gradients(train.max_gradient_norm)
        few.optimizer.step()
    found = [
        ParameterGradient(
            name=name,
            elements=value.numel(),
            # Python's max of a list with NaN depends on its order.
            norm=max((norm for norm in norms[name] if norm == norm), default=None),  # noqa: PLR0124
            finite=all(torch.tensor(norms[name]).isfinite().tolist()),
        )
        for name, value in trained.items()
    ]
    logger.info("%d trained parameters, %d without a gradient", len(found), len(without_gradient(found)))
    return GradientReport(parameters=found, batches=len(few.batches))


def without_gradient(parameters: list[ParameterGradient]) -> list[str]:
    """Return the names of the parameters whose gradient never came, or was zero every time."""
    return [found.name for found in parameters if found.finite and not found.norm]


def not_finite(parameters: list[ParameterGradient]) -> list[str]:
    """Return the names of the parameters with a gradient that is no number."""
    return [found.name for found in parameters if not found.finite]


def _shown(names: list[str]) -> str:
    return listed(names[:NUM_NAMED], len(names))


def check_gradients(report: GradientReport) -> None:
    """Refuse a model of which a part learns nothing, or whose gradients are no numbers.

    Raises:
        WrongInput: Names the parameters, and what may be wrong.
    """
    total = len(report.parameters)
    if names := not_finite(report.parameters):
        raise WrongInput(
            f"the gradients of {len(names)} of {total} parameters are no numbers ({_shown(names)}): {WAY_OUT}"
        )
    if names := without_gradient(report.parameters):
        raise WrongInput(
            f"{len(names)} of {total} trained parameters got no gradient in {report.batches} batches "
            f"({_shown(names)}): the loss does not depend on them; freeze them, or take another train.model"
        )
