"""Augmentation of training batches."""

import pytest
import torch
from scipy.ndimage import map_coordinates
from torch.nn import functional
from torchvision.transforms import v2

from tasks.config.augmentation import AugmentationConfig
from tasks.model import augmentation
from tasks.model.augmentation import ASPECT, make_augment, transform_batch

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


def ramps(num_images: int, side: int) -> torch.Tensor:
    """Return images whose red is the column and whose green the row, twice the number of the pixel."""
    ramp = torch.arange(side, dtype=torch.uint8).mul(2)
    red_green = torch.stack(torch.meshgrid(ramp, ramp, indexing="xy"))
    return torch.cat([red_green, torch.zeros(1, side, side, dtype=torch.uint8)]).expand(num_images, -1, -1, -1)


@pytest.mark.parametrize("side", [48, 64])
def test_batch_has_crops_with_the_distribution_of_torchvision(side: int) -> None:
    """Each image has its own box, whose area and aspect have the means of those of RandomResizedCrop."""
    count, source = 2000, 96
    torch.manual_seed(1)
    found = transform_batch(AugmentationConfig(resized_crop=0.3, flip=True), side, ramps(count, source)).double()
    assert found.shape == (count, 3, side, side)
    # The first and the last pixel lie half a pixel of the crop inside it.
    lines = {0: found[:, 0, side // 2, :] / 2 + 0.5, 1: found[:, 1, :, side // 2] / 2 + 0.5}
    spans = {axis: line[:, -8] - line[:, 7] for axis, line in lines.items()}
    width, height = (spans[axis].abs() * side / (side - 15) for axis in (0, 1))
    middles = {axis: (line[:, -8] + line[:, 7]) / 2 for axis, line in lines.items()}
    for axis, size in ((0, width), (1, height)):
        assert (middles[axis] - size / 2).min() > -1.5
        assert (middles[axis] + size / 2).max() < source + 1.5
        assert 0.95 < (middles[axis] / source).mean() / 0.5 < 1.05
        assert (middles[axis] / source).std() > 0.05
    assert 0.45 < (spans[0] < 0).double().mean() < 0.55
    assert (spans[1] > 0).all()
    crop = v2.RandomResizedCrop(side, scale=(0.3, 1.0), ratio=ASPECT)
    boxes = [crop.make_params([ramps(1, source)[0]]) for _ in range(count)]
    heights, widths = torch.tensor([[box["height"], box["width"]] for box in boxes]).double().T
    for ours, theirs in ((width * height, widths * heights), (width / height, widths / heights)):
        assert ours.mean().item() == pytest.approx(theirs.mean().item(), rel=0.02)
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.08)


def test_crops_of_a_batch_are_interpolated_linearly() -> None:
    """The pixels of an image are those of its neighbours at the places that another image with the same box shows."""
    torch.manual_seed(2)
    smooth = functional.interpolate(torch.rand(1, 3, 3, 3) * 255, 96, mode="bicubic").clamp(0, 255)
    images = smooth.round().to(torch.uint8).expand(32, -1, -1, -1)
    drawn = []
    for batch in (images, images, ramps(32, 96)):
        torch.manual_seed(3)
        drawn.append(transform_batch(AugmentationConfig(resized_crop=0.5), 96, batch))
    found, again, places = drawn
    assert torch.equal(found, again)
    assert not torch.equal(found[0], found[1])
    for image, place in zip(found, places, strict=True):
        rows_columns = [place[1].numpy() / 2, place[0].numpy() / 2]
        for channel in range(3):
            expected = map_coordinates(images[0][channel].double().numpy(), rows_columns, order=1, mode="nearest")
            assert abs(image[channel].numpy() - expected).max() < 4


def test_batch_has_the_colours_of_torchvision() -> None:
    """Brightness and contrast are changed within the limits, by as much in each pixel of an image."""
    torch.manual_seed(4)
    images = torch.randint(60, 160, (200, 3, 16, 16), dtype=torch.uint8)
    found = transform_batch(AugmentationConfig(colour=0.2), 16, images).double()
    before, grey = images.double(), v2.functional.rgb_to_grayscale(images).double().mean(dim=(1, 2, 3))
    slope = ((found - found.mean(dim=(1, 2, 3), keepdim=True)) * before).sum(dim=(1, 2, 3)) / (
        (before - before.mean(dim=(1, 2, 3), keepdim=True)) * before
    ).sum(dim=(1, 2, 3))
    after = v2.functional.rgb_to_grayscale(found).mean(dim=(1, 2, 3))
    brightness, contrast = after / grey, slope * grey / after
    for factor in (brightness, contrast):
        assert 0.79 < factor.min() < 0.83
        assert 1.17 < factor.max() < 1.21
        assert factor.mean().item() == pytest.approx(1.0, abs=0.03)
    expected = v2.functional.adjust_contrast(
        v2.functional.adjust_brightness(images[0], float(brightness[0])), float(contrast[0])
    )
    assert (found[0] - expected.double()).abs().max() <= 2


def test_batch_without_a_crop_has_the_same_pixels() -> None:
    """Mirroring alone, and no transform, change no pixel."""
    images = torch.randint(0, 256, (32, 3, 17, 17), dtype=torch.uint8)
    assert torch.equal(transform_batch(AugmentationConfig(rand_augment=1), 17, images), images)
    torch.manual_seed(5)
    found = transform_batch(AugmentationConfig(flip=True), 17, images)
    kinds = {
        "same" if torch.equal(one, image) else "mirrored" if torch.equal(one, image.flip(2)) else "other"
        for one, image in zip(found, images, strict=True)
    }
    assert kinds == {"same", "mirrored"}


def test_only_a_cpu_transforms_images_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device gets a whole batch at once, with images of the same form."""
    counts = []

    def spy(settings: AugmentationConfig, image_size: int, images_BCHW: torch.Tensor) -> torch.Tensor:
        counts.append(len(images_BCHW))
        return transform_batch(settings, image_size, images_BCHW)

    monkeypatch.setattr(augmentation, "transform_batch", spy)
    augment = make_augment(AugmentationConfig(flip=True, resized_crop=0.5, colour=0.2), SIDE, CLASSES)
    assert augment is not None
    images, labels = batch()
    augment(images, labels)
    assert counts == []
    found, targets = augment(images.to("meta"), labels)
    assert counts == [len(images)]
    assert (found.device.type, found.shape, found.dtype) == ("meta", images.shape, torch.uint8)
    assert targets is labels
