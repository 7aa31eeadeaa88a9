"""Augmentation of training batches on the device of the model."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torchvision.transforms import v2

from tasks.config.augmentation import AugmentationConfig

ASPECT = (3 / 4, 4 / 3)
"""Aspect ratios (width / height) of a crop: Szegedy et al., "Going Deeper with Convolutions" (2015), section 6."""


def make_augment(
    settings: AugmentationConfig, image_size: int, num_classes: int
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """Return a function that augments a batch, or None without augmentation.

    torchvision's transforms draw their parameters once per call: they are called per image, MixUp and CutMix per
    batch. All use torch's default generator, so that seeding it before a step reproduces the images. A CPU transforms
    images in a thread of their own.

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
    if settings.rand_augment:
        transforms.append(v2.RandAugment(num_ops=settings.rand_augment))
    transform, pool = (v2.Compose(transforms), _single_thread()) if transforms else (None, None)
    blends: list[v2.Transform] = []
    if settings.mixup:
        blends.append(v2.MixUp(alpha=settings.mixup, num_classes=num_classes))
    if settings.cutmix:
        blends.append(v2.CutMix(alpha=settings.cutmix, num_classes=num_classes))
    blend = v2.RandomChoice(blends) if blends else None

    def augment(images_BHWC: torch.Tensor, labels_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images_BCHW = images_BHWC.permute(0, 3, 1, 2)
        targets = labels_B
        if transform is not None:
            transform_all = partial(_transform_all, transform, images_BCHW)
            images_BCHW = (
                transform_all() if pool is None or images_BHWC.is_cuda else pool.submit(transform_all).result()
            )
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


def _transform_all(transform: v2.Transform, images_BCHW: torch.Tensor) -> torch.Tensor:
    return torch.stack([transform(image_CHW) for image_CHW in images_BCHW])
