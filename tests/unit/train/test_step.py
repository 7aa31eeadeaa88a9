"""Loss of a training step on augmented batches, compared with a formula."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.config.augmentation import AugmentationConfig
from tasks.model.augmentation import make_augment
from tasks.train.loop import train_one_epoch
from tasks.train.step import StepSettings, step_seed
from tests.fakes.tiny_training import NUM_CLASSES, Recorder, TensorLoader, loop_of

SIDE, EPOCH, RATE = 16, 2, 0.05
STEPS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10], [11]]
"""Rows of the steps of an epoch; the last step has one image, which is not blended."""


class Pixels(nn.Linear):
    """Linear classifier on pixels."""

    def __init__(self) -> None:
        super().__init__(SIDE * SIDE * 3, NUM_CLASSES)

    def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        """Return logits of images, uint8 or float32 of 0 to 255."""
        return super().forward(images_BHWC.float().flatten(1) / 255)


def loss_by_formula(
    logits_BK: torch.Tensor, targets: torch.Tensor, weights_K: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """Return the sum over images of -sum_k w_k q_k log p_k, where q distributes `smoothing` over all classes."""
    shares_BK = targets if targets.ndim == 2 else functional.one_hot(targets, NUM_CLASSES)
    target_BK = (1 - smoothing) * shares_BK + smoothing / NUM_CLASSES
    log_p_BK = logits_BK - logits_BK.exp().sum(dim=1, keepdim=True).log()
    return -(weights_K * target_BK * log_p_BK).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "changes",
    [
        {"flip": True},
        {"resized_crop": 0.3},
        {"rand_augment": 2},
        {"mixup": 0.4},
        {"cutmix": 1.0},
        {"flip": True, "resized_crop": 0.5, "rand_augment": 1, "mixup": 0.2, "cutmix": 1.0},
    ],
    ids=["flip", "crop", "rand-augment", "mixup", "cutmix", "all"],
)
def test_epoch_trains_on_augmented_images_and_labels(changes: dict[str, Any], smoothing: float) -> None:
    """An epoch equals gradient descent on the formula with class weights, label smoothing and augmentation."""
    torch.manual_seed(3)
    images = torch.randint(0, 256, (12, SIDE, SIDE, 3), dtype=torch.uint8)
    labels = torch.arange(12) % NUM_CLASSES
    weights = torch.tensor([0.5, 1.0, 2.0])
    augment = make_augment(AugmentationConfig.model_validate(changes), SIDE, NUM_CLASSES)
    assert augment is not None
    model = Pixels()
    reference = copy.deepcopy(model)

    summed, changed = 0.0, False
    for step, rows in enumerate(STEPS):
        torch.manual_seed(step_seed(5, EPOCH, step, rank=0))
        inputs, targets = augment(images[rows], labels[rows])
        changed |= not torch.equal(inputs.float(), images[rows].float())
        loss = loss_by_formula(reference(inputs), targets, weights, smoothing)
        gradients = torch.autograd.grad(loss / len(rows), list(reference.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
        summed += float(loss.detach())

    trained = train_one_epoch(
        model,
        TensorLoader(images, labels, STEPS),
        torch.optim.SGD(model.parameters(), lr=0.0),
        loop_of(
            Recorder(RATE),
            step=StepSettings(label_smoothing=smoothing, class_weights_K=weights, augment=augment, seed=5),
        ),
        EPOCH,
    )

    assert changed
    assert trained.train_loss == pytest.approx(summed / len(labels), rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6), name
