"""Augmentation of training batches on the device of the model."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch.nn import functional
from torchvision.transforms import v2

from tasks.config.augmentation import AugmentationConfig

ASPECT = (3 / 4, 4 / 3)
"""Aspect ratios (width / height) of a crop: Szegedy et al., "Going Deeper with Convolutions" (2015), section 6."""

TRIES = 10
"""Crops that are drawn per image, of which the first one inside the image is taken, as by torchvision."""


def make_augment(
    settings: AugmentationConfig, image_size: int, num_classes: int
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """Return a function that augments a batch, or None without augmentation.

    torchvision's transforms draw their parameters once per call: a CPU calls them per image, in a thread of its own,
    and MixUp and CutMix per batch. On a GPU, where a call takes longer to start than to compute, the batch is cropped,
    mirrored and recoloured at once; RandAugment still is per image. All use torch's default generators, so that seeding
    them before a step reproduces the images.

    Args:
        settings: The transforms and their parameters.
        image_size: Side of the images, in pixels.
        num_classes: Number of classes K.

    Returns:
        A function of images, uint8 (B, H, W, 3), and labels, int64 (B,). It returns uint8 images of the same shape and
        the labels; with MixUp or CutMix, float32 images from 0 to 255 and shares of the classes, float32 (B, K).
    """
    if not settings.is_on:
        return None
    transforms: list[v2.Transform] = []
    if settings.resized_crop < 1.0:
        # uint8, as torchvision's uint8 kernels are faster on a CPU; antialiasing, as for the pixels of the cache.
        scale = (settings.resized_crop, 1.0)
        transforms.append(v2.RandomResizedCrop(image_size, scale=scale, ratio=ASPECT, antialias=True))
    if settings.colour:
        transforms.append(v2.ColorJitter(brightness=settings.colour, contrast=settings.colour))
    if settings.flip:
        transforms.append(v2.RandomHorizontalFlip())
    operations = [v2.RandAugment(num_ops=settings.rand_augment)] if settings.rand_augment else []
    transforms += operations
    pool = _single_thread() if transforms else None
    blends: list[v2.Transform] = []
    if settings.mixup:
        blends.append(v2.MixUp(alpha=settings.mixup, num_classes=num_classes))
    if settings.cutmix:
        blends.append(v2.CutMix(alpha=settings.cutmix, num_classes=num_classes))
    blend = v2.RandomChoice(blends) if blends else None

    def augment(images_BHWC: torch.Tensor, labels_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images_BCHW, targets = images_BHWC.permute(0, 3, 1, 2), labels_B
        if images_BHWC.device.type != "cpu":
            images_BCHW = _transform_each(operations, transform_batch(settings, image_size, images_BCHW))
        elif pool is not None:
            images_BCHW = pool.submit(_transform_each, transforms, images_BCHW).result()
        if blend is not None and len(labels_B) > 1:
            images_BCHW, targets = blend(images_BCHW.float(), labels_B)
        return images_BCHW.permute(0, 2, 3, 1), targets

    return augment


def _single_thread() -> ThreadPoolExecutor:
    """Return a thread whose operations use no other ones; the caller's operations use as many as before.

    On a CPU, an operation on one image wakes other threads for less time than that takes (tests/benchmarks/LOG.md).
    """
    number = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, "augmentation", partial(torch.set_num_threads, 1))
    pool.submit(int).result()
    torch.set_num_threads(number)
    return pool


def _transform_each(transforms: Sequence[v2.Transform], images_BCHW: torch.Tensor) -> torch.Tensor:
    if not transforms:
        return images_BCHW
    transform = v2.Compose(transforms)
    return torch.stack([transform(image_CHW) for image_CHW in images_BCHW])


def transform_batch(settings: AugmentationConfig, image_size: int, images_BCHW: torch.Tensor) -> torch.Tensor:
    """Crop, mirror and recolour the images of a batch at once, each with its own parameters.

    The parameters have the distribution of torchvision's RandomResizedCrop, RandomHorizontalFlip and ColorJitter; the
    corners of a crop are not rounded to pixels.

    Args:
        settings: The parameters; MixUp, CutMix and RandAugment are left out.
        image_size: Side of the returned images, in pixels.
        images_BCHW: Images, uint8 (B, 3, H, W).

    Returns:
        Images, uint8 (B, 3, image_size, image_size).
    """
    crops = settings.resized_crop < 1.0
    if not (crops or settings.flip or settings.colour):
        return images_BCHW
    count, device = len(images_BCHW), images_BCHW.device

    def draw(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, count, device=device).uniform_(low, high)

    values_BCHW = images_BCHW.float()
    if crops or settings.flip:
        area = draw(settings.resized_crop, 1.0, TRIES)
        aspect = draw(math.log(ASPECT[0]), math.log(ASPECT[1]), TRIES).exp()
        sides = torch.stack([area * aspect, area / aspect]).sqrt()  # width and height as fractions
        first = (sides <= 1).all(dim=0).byte().argmax(dim=0).expand(2, 1, -1)
        sides = sides.gather(1, first).squeeze(1)
        sides = torch.where((sides <= 1).all(dim=0), sides, 1.0)
        # In coordinates from -1 to 1: a point of the crop's image as a point of the image.
        theta_B23 = images_BCHW.new_zeros((count, 2, 3), dtype=torch.float32)
        mirrored = torch.where(draw(0, 1) < 0.5, -1.0, 1.0) if settings.flip else 1.0
        theta_B23[:, 0, 0], theta_B23[:, 1, 1] = sides[0] * mirrored, sides[1]
        theta_B23[:, :, 2] = ((1 - sides) * draw(-1, 1, 2)).T
        grid = functional.affine_grid(theta_B23, [count, 3, image_size, image_size], align_corners=False)
        values_BCHW = functional.grid_sample(values_BCHW, grid, padding_mode="border", align_corners=False)
    if settings.colour:
        brightness, contrast = draw(1 - settings.colour, 1 + settings.colour, 2)[..., None, None, None]
        grey_B = v2.functional.rgb_to_grayscale(values_BCHW).mean(dim=(1, 2, 3), keepdim=True)
        values_BCHW = (brightness * torch.lerp(grey_B, values_BCHW, contrast)).clamp(0, 255)
    return values_BCHW.round().to(torch.uint8)
