"""Overfit one batch: a model that cannot fit a few images cannot learn from many."""

import logging

from tasks.config.sanity import OverfitConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, OverfitReport
from tasks.sanity.first_batches import first_batches
from tasks.train.phases import phases_of

logger = logging.getLogger("lakevision.sanity")


def overfit_batch(train: TrainConfig, cache: CacheRef, overfit: OverfitConfig) -> OverfitReport:
    """Train on the first batch alone, at `train.learning_rate`, until its loss reaches the target or steps run out.

    After Karpathy, "A Recipe for Training Neural Networks" (2019), "overfit one batch". It trains as in the first
    phase: the learning rates of later phases suit a trained head, and a new head learns little with them.

    Args:
        train: Model, optimizer, learning rate, precision, batch size and seed of the training run.
        cache: Cache of the images.
        overfit: Number of steps and target of the loss.

    Raises:
        WrongInput: As `first_batches`.
    """
    setup = first_batches(train, phases_of(train)[0], cache, 1)
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
    # `not <`, and not `>=`, so that a NaN loss fails.
    if not last < overfit.target_loss_ratio * first:
        raise WrongInput(
            f"the loss of one batch of {report.num_images} images went from {first:.4f} to {last:.4f} in "
            f"{len(report.losses) - 1} steps, not below {overfit.target_loss_ratio:g} of its initial value: try "
            f"another train.learning_rate than {train.learning_rate:g}, or a higher overfit.max_steps; otherwise "
            "check that labels match images, and that gradients reach the trained layers (the flow check-gradients)"
        )
