"""Augmentation of training batches."""

import pytest
import torch

from tasks.config.augmentation import AugmentationConfig
from tasks.model.augmentation import make_augment

SIDE, CLASSES = 16, 4


def batch(num_images: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images with a horizontal gradient, and labels."""
    ramp = torch.arange(SIDE, dtype=torch.uint8).mul(10).view(1, 1, SIDE, 1)
    return ramp.expand(num_images, SIDE, SIDE, 3).contiguous(), torch.arange(num_images) % CLASSES


def test_default_is_no_augmentation() -> None:
    """The default settings return None instead of a function."""
    assert make_augment(AugmentationConfig(), SIDE, CLASSES) is None


def test_flip_is_drawn_per_image() -> None:
    """Some images of a batch are mirrored and the others unchanged, with the same labels."""
    augment = make_augment(AugmentationConfig(flip=True), SIDE, CLASSES)
    assert augment is not None
    images, labels = batch(32)
    torch.manual_seed(1)
    found, targets = augment(images, labels)

    mirrored = [bool(torch.equal(image, original.flip(1))) for image, original in zip(found, images, strict=True)]
    same = [bool(torch.equal(image, original)) for image, original in zip(found, images, strict=True)]
    assert any(mirrored)
    assert any(same)
    assert all(first != second for first, second in zip(mirrored, same, strict=True))
    assert torch.equal(targets, labels)


@pytest.mark.parametrize(
    "settings",
    [AugmentationConfig(resized_crop=0.2), AugmentationConfig(rand_augment=2), AugmentationConfig(mixup=0.4)],
)
def test_same_seed_gives_the_same_augmentation(settings: AugmentationConfig) -> None:
    """The same seed reproduces a batch, as a resumed step needs, and another seed does not."""
    augment = make_augment(settings, SIDE, CLASSES)
    assert augment is not None
    images, labels = batch()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(augment(images, labels))

    assert all(found.shape == images.shape for found, _targets in drawn)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])


@pytest.mark.parametrize("settings", [AugmentationConfig(mixup=0.4), AugmentationConfig(cutmix=1.0)])
def test_blended_images_have_shares_of_labels(settings: AugmentationConfig) -> None:
    """The labels of blended images are shares of at most two classes, and sum to one."""
    augment = make_augment(settings, SIDE, CLASSES)
    assert augment is not None
    torch.manual_seed(3)
    found, targets = augment(*batch())

    assert targets.shape == (8, CLASSES)
    assert torch.allclose(targets.sum(dim=1), torch.ones(8))
    assert int((targets > 0).sum(dim=1).max()) <= 2
    assert found.dtype == torch.float32
    assert float(found.min()) >= 0.0
    assert float(found.max()) <= 255.0


def test_single_image_is_not_blended() -> None:
    """A batch of one image is unchanged by MixUp, which needs two."""
    augment = make_augment(AugmentationConfig(mixup=0.4), SIDE, CLASSES)
    assert augment is not None
    images, labels = batch(1)
    found, targets = augment(images, labels)
    assert torch.equal(found, images)
    assert torch.equal(targets, labels)
