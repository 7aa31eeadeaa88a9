"""Overfit one batch: a model that cannot learn a few images by heart learns nothing from many."""

import logging

from tasks.config.sanity import OverfitConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, OverfitReport
from tasks.sanity.first_batches import first_batches
from tasks.train.phases import phases_of

logger = logging.getLogger("lakevision.sanity")


def overfit_batch(train: TrainConfig, cache: CacheRef, overfit: OverfitConfig) -> OverfitReport:
    """Train on the first batch alone, at `train.learning_rate`, until its loss has fallen far enough or steps run out.

    After Karpathy, "A Recipe for Training Neural Networks" (2019), "overfit one batch". It is the first phase that
    trains: with the learning rates of later ones, which are for a head that has learnt before, a new one learns little.

    Args:
        train: Model, optimizer, learning rate, precision, batch size and seed, as a training has them.
        cache: Where the images come from.
        overfit: How many steps, and how far the loss is to fall.

    Raises:
        WrongInput: As `first_batches`.
    """
    few = first_batches(train, phases_of(train)[0], cache, 1)
    losses: list[float] = []
    # Once more than there are steps: the last loss is that after the last step.
    for step in range(overfit.max_steps + 1):
        loss = few.loss(0)
        losses.append(float(loss.detach()))
        if losses[-1] < overfit.target_loss_ratio * losses[0] or step == overfit.max_steps:
            break
        few.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        few.bound_gradients(train.max_gradient_norm)
        few.optimizer.step()
    logger.info("the loss of one batch went from %.4f to %.4f in %d steps", losses[0], losses[-1], len(losses) - 1)
    return OverfitReport(losses=losses, num_images=len(few.batches[0][1]))


def check_overfitted(report: OverfitReport, train: TrainConfig, overfit: OverfitConfig) -> None:
    """Refuse a model that did not learn its one batch by heart.

    Raises:
        WrongInput: Says how far the loss fell, and what may be wrong.
    """
    first, last = report.losses[0], report.losses[-1]
    # Not "greater than": NaN is no success.
    if not last < overfit.target_loss_ratio * first:
        raise WrongInput(
            f"the loss of one batch of {report.num_images} images went from {first:.4f} to {last:.4f} in "
            f"{len(report.losses) - 1} steps and not below {overfit.target_loss_ratio:g} of what it was: try another "
            f"train.learning_rate than {train.learning_rate:g}, or a higher overfit.max_steps; if that does not help, "
            "labels do not go with images, or no gradient reaches what is trained (the flow check-gradients)"
        )
