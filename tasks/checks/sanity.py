"""Sanity checks: a model overfits one batch, and every trained parameter gets a finite, non-zero gradient.

Model, optimizer and batches are built by the functions of training.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer
from tasks.config.checks import GradientConfig, OverfitConfig
from tasks.config.recipe import UNPLANNED, Phase, phases_of
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, join_names
from tasks.model.device import make_optimizer, take_device
from tasks.model.precision import choose_precision
from tasks.model.training_network import Classifier, build_classifier
from tasks.refs import TRAIN, CacheRef, GradientReport, OverfitReport, ParameterGradient
from tasks.system.cores import gpus_for
from tasks.system.slots import take_slot
from tasks.train.non_finite import WAY_OUT
from tasks.train.phases import unfreeze

logger = logging.getLogger("lakevision.sanity")

MAX_WAIT_SECONDS = 1800
"""Maximum time that a check waits for a GPU, in seconds: half of its stage's time limit."""

NUM_NAMED = 8
"""Maximum number of parameters in the error; the report has all of them."""


@dataclass(frozen=True)
class FirstBatches:
    """A classifier in training mode, its optimizer, and batches of the split `train` on its device."""

    classifier: Classifier
    optimizer: torch.optim.Optimizer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    """Images (uint8, BHWC) and labels (int64, B) per batch."""

    def loss(self, batch: int) -> torch.Tensor:
        """Return the mean cross-entropy of a batch in nats, without label smoothing, whose loss never reaches 0."""
        images_BHWC, labels_B = self.batches[batch]
        if len(labels_B) == 1:  # Repeated, as in training: batch norm needs more than one value. The mean is the same.
            images_BHWC, labels_B = images_BHWC.repeat(2, 1, 1, 1), labels_B.repeat(2)
        return functional.cross_entropy(self.classifier(images_BHWC), labels_B)

    def clip_gradients(self, max_norm: float | None) -> None:
        """Clip the gradients' norm to `max_norm`, unless it is None."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.classifier.parameters(), max_norm)


@contextmanager
def first_batches(train: TrainConfig, phase: Phase, cache: CacheRef, num_batches: int) -> Iterator[FirstBatches]:
    """Build model and optimizer as training does, and yield them with the first batches of epoch 0.

    A GPU has a slot meanwhile, as those of training runs, which the check waits for.

    Args:
        train: Model, optimizer, precision, batch size and seed of the training run.
        phase: Phase of the training run, which sets the trained layers and the learning rate.
        cache: Cache of the images.
        num_batches: Number of batches at most; fewer if the split has fewer.

    Raises:
        WrongInput: Invalid weights, model, layer, device or precision.
        CacheDamaged: The cache was changed or removed.
        TimeLimitExceeded: Ranks had all GPUs for `train.timeout_seconds` or MAX_WAIT_SECONDS.
    """
    manifest, gpus = open_cache(cache), gpus_for(train.device)
    with take_slot(gpus, min(train.timeout_seconds, MAX_WAIT_SECONDS)) if gpus else nullcontext() as slot:
        device = take_device(train.device, slot.number if slot else 0, Reducer())
        torch.manual_seed(train.seed)
        classes, freeze = manifest.classes, train.trained != "all"
        classifier = build_classifier(train.model, train.weights, len(classes), freeze, classes, train.dropout)
        classifier = classifier.to(device)
        unfreeze(classifier, phase)
        # Without the scaled loss of training, small gradients of float16 would be 0.
        precision = choose_precision(train.precision, device, manifest.image_size)
        classifier.precision = None if precision is torch.float16 else precision
        batch_size = train.reference_batch_size if train.batch_size == "auto" else train.batch_size
        loader = CacheLoader(cache.url, manifest, TRAIN, batch_size, seed=train.seed)
        # Cloned: the loader reuses a batch's memory.
        batches = [
            (batch.inputs.to(device).clone(), batch.labels_B.to(device).clone())
            for batch in islice(loader.epoch(0), num_batches)
        ]
        yield FirstBatches(classifier.train(), make_optimizer(phase.train, classifier), batches)


def measure_gradients(train: TrainConfig, cache: CacheRef, gradients: GradientConfig) -> GradientReport:
    """Train on the first batches as in the last phase, and return the gradient norms of all trained parameters.

    The last phase trains the most layers: each phase of fine-tuning unfreezes more than the one before.

    Args:
        train: Model, optimizer, learning rate, precision, batch size and seed of the training run.
        cache: Cache of the images.
        gradients: Number of batches.

    Raises:
        WrongInput, TimeLimitExceeded: As `first_batches`.
    """
    last = phases_of(train, UNPLANNED)[-1]
    with first_batches(train, last, cache, gradients.num_batches) as setup:
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
            f"the gradients of {len(names)} of {total} parameters are non-finite ({_shown(names)})", way_out=WAY_OUT
        )
    if names := without_gradient(report.parameters):
        raise WrongInput(
            f"{len(names)} of {total} trained parameters got no gradient in {report.batches} batches ({_shown(names)})",
            setting="train.model",
            way_out="the loss does not depend on them; freeze them, or choose another train.model",
        )


def overfit_batch(train: TrainConfig, cache: CacheRef, overfit: OverfitConfig) -> OverfitReport:
    """Train on the first batch alone, at `train.learning_rate`, until its loss reaches the target or steps run out.

    After Karpathy, "A Recipe for Training Neural Networks" (2019), "overfit one batch". It trains as in the first
    phase: the learning rates of later phases suit a trained head, and a new head learns little with them.

    Args:
        train: Model, optimizer, learning rate, precision, batch size and seed of the training run.
        cache: Cache of the images.
        overfit: Number of steps and target of the loss.

    Raises:
        WrongInput, TimeLimitExceeded: As `first_batches`.
    """
    with first_batches(train, phases_of(train)[0], cache, 1) as setup:
        losses: list[float] = []
        # One iteration more than steps: the last loss is measured after the last step.
        for step in range(overfit.max_steps + 1):
            loss = setup.loss(0)
            losses.append(float(loss.detach()))
            if losses[-1] < overfit.target_loss_ratio * losses[0] or step == overfit.max_steps:
                break
            setup.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not type backward
            setup.clip_gradients(train.max_gradient_norm)
            setup.optimizer.step()
        logger.info("the loss of one batch went from %.4f to %.4f in %d steps", losses[0], losses[-1], len(losses) - 1)
        return OverfitReport(losses=losses, num_images=len(setup.batches[0][1]))


def check_overfitted(report: OverfitReport, train: TrainConfig, overfit: OverfitConfig) -> None:
    """Raise an error if the model did not overfit the batch.

    Raises:
        WrongInput: Has the first and the last loss, and the likely causes.
    """
    first, last = report.losses[0], report.losses[-1]
    rate = phases_of(train)[0].train.learning_rate
    # `not <`, and not `>=`, so that a NaN loss fails.
    if not last < overfit.target_loss_ratio * first:
        raise WrongInput(
            f"the loss of one batch of {report.num_images} images went from {first:.4f} to {last:.4f} in "
            f"{len(report.losses) - 1} steps, not below {overfit.target_loss_ratio:g} of its initial value",
            setting="train.learning_rate",
            way_out=f"try another train.learning_rate than {rate:g}, or a higher overfit.max_steps; "
            "otherwise check that labels match images, and that gradients reach the trained layers (the flow "
            "check-gradients)",
        )
