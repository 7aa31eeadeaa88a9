"""Plan of a recipe's fine-tuning: the epochs for which the time budget suffices, and whether images are mirrored.

It is made once, when the head is trained, and recorded: a resumed or repeated run trains as many epochs anywhere.
"""

import math
import time
from itertools import islice

import torch

from tasks.collectives.reducer import gather_numbers
from tasks.config.recipe import MAX_PLANNED_EPOCHS, FineTuningPlan, Phase, phases_of
from tasks.metrics.evaluate import logits_of
from tasks.model.augmentation import make_augment
from tasks.model.precision import trial, trial_loss
from tasks.progress.activity import working
from tasks.refs import TRAIN, VAL
from tasks.train.context import TrainingContext
from tasks.train.features import BATCH
from tasks.train.phases import unfreeze

WARM_STEPS, TIMED_STEPS = 2, 3
"""Steps before the measurement, which allocate memory, and those that are measured."""

TIMED_BATCH = 32
"""Maximum number of images of its steps."""

FORWARD_SHARE = 1 / 3
"""Time of a forward pass as a share of that of a training step: the backward pass computes two gradients per layer."""

MAX_MIRRORED = 256
"""Number of validation images that are mirrored, over all ranks."""

MIN_DIFFERENCE = 0.02
"""Share of the mirrored images by which more must be misclassified, so that chance or a weak head does not decide."""


def plan_fine_tuning(context: TrainingContext, seconds_left: float) -> FineTuningPlan:
    """Return the plan; a collective operation, between the training of the head and the next phase.

    Args:
        context: The training run, whose network has the weights of the trained head.
        seconds_left: Time budget; that of rank 0 counts.
    """
    with working("planning the fine-tuning"):
        flip, why = _may_mirror(context)
        epoch_seconds = float(gather_numbers(context.reducer, _epoch_seconds(context, flip=flip)).max())
        left = float(context.reducer.broadcast(torch.tensor([max(0.0, seconds_left)], dtype=torch.float64)))
    fitting = min(MAX_PLANNED_EPOCHS, left / epoch_seconds)
    epochs = max(math.floor(fitting), int(context.spec.train.recipe == "finetune"))
    is_bounded = math.isfinite(left)
    budget = f"{left:.0f} s of the budget (train.max_seconds) are left" if is_bounded else "without a budget"
    what = f"{epochs} epochs of all layers" if epochs else "left out"
    return FineTuningPlan(
        epochs=epochs, flip=flip, reason=f"{what}: an epoch takes {epoch_seconds:.1f} s, and {budget}; {why}"
    )


def _epoch_seconds(context: TrainingContext, *, flip: bool) -> float:
    """Return the time of an epoch of all layers on this rank, from a few steps on images without content."""
    rows = {split: context.manifest.splits[split].rows for split in (TRAIN, VAL)}
    phase = phases_of(context.spec.train, FineTuningPlan(epochs=1, flip=flip, reason=""))[-1]
    unfreeze(context.classifier, phase)
    seconds = image_seconds(context, phase, min(TIMED_BATCH, rows[TRAIN]))
    context.classifier.freeze_all_but([context.classifier.head])
    return seconds * (rows[TRAIN] + FORWARD_SHARE * rows[VAL]) / context.reducer.num_ranks


def image_seconds(context: TrainingContext, phase: Phase, batch: int) -> float:
    """Return the time of a training step per image; weights, gradients and statistics stay as they are.

    Args:
        context: The training run, whose network trains the layers of the phase.
        phase: The phase.
        batch: Images per step.
    """
    device, size = context.device, context.manifest.image_size
    augment = make_augment(phase.train.augmentation, size, len(context.manifest.classes))
    example = torch.zeros(size, size, 3, dtype=torch.uint8)
    images, labels = example.expand(batch, -1, -1, -1).to(device), torch.zeros(batch, dtype=torch.int64, device=device)
    with trial(context.classifier):
        for step in range(WARM_STEPS + TIMED_STEPS):
            if step == WARM_STEPS:
                began = _now(device)
            if augment is not None:
                augment(images, labels)
            loss = trial_loss(context.classifier, example, batch, device)
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not type backward
        return (_now(device) - began) / (TIMED_STEPS * batch)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _may_mirror(context: TrainingContext) -> tuple[bool, str]:
    """Return whether mirrored images keep their class, by the trained head on the split `val`, and the reason.

    The test is McNemar's, with a bound of two standard deviations. It counts the images of which only one of the two
    predictions is right.
    """
    num_ranks = context.reducer.num_ranks
    sums = torch.zeros(3, dtype=torch.float64)  # images, right only as they are, right only mirrored
    num_batches = math.ceil(MAX_MIRRORED / (BATCH * num_ranks))
    with torch.inference_mode():
        batches = logits_of(context.classifier, context.images(VAL, BATCH), context.device)
        for batch, labels_B, logits_BK in islice(batches, num_batches):
            mirrored_BK = context.classifier(batch.inputs.to(context.device).flip(2))
            right, also = logits_BK.argmax(1) == labels_B, mirrored_BK.argmax(1) == labels_B
            sums += torch.tensor([len(labels_B), (right & ~also).sum(), (also & ~right).sum()], dtype=torch.float64)
    count, lost, won = (int(value) for value in context.reducer.sum(sums).tolist())
    keeps = lost - won <= max(2 * math.sqrt(lost + won), MIN_DIFFERENCE * count)
    counted = f"of {count} validation images {lost} are recognised only as they are, and {won} only mirrored"
    return keeps, f"images are {'' if keeps else 'not '}mirrored: {counted}"
