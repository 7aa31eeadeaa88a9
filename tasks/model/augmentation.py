"""Random changes of training images on the device they are trained on."""

from collections.abc import Callable

import torch
from torchvision.transforms import v2

from tasks.config.train import AugmentationConfig

ASPECT = (3 / 4, 4 / 3)
"""Width by height of a crop: that of Szegedy et al., "Going Deeper with Convolutions" (2015), section 6."""


def make_augment(
    settings: AugmentationConfig, image_size: int, num_classes: int
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """Return what changes a batch, or None where nothing is changed.

    torchvision's transforms draw once a call: each image is given to them alone, MixUp and CutMix get the batch. All
    draw from torch's own generator, so that a seed set before a step gives the same images again.

    Args:
        settings: What is changed.
        image_size: Side of the images, in pixels.
        num_classes: K.

    Returns:
        From images, uint8 (B, H, W, 3), and labels, int64 (B,), to images of the same shape, uint8 or, blended,
        float32 of 0 to 255, and labels, or where images are blended the shares of the classes, float32 (B, K).
    """
    if not settings.is_on:
        return None
    each: list[v2.Transform] = []
    if settings.resized_crop < 1.0:
        # torchvision's uint8 kernels are the faster ones on a CPU, and antialiasing is what the cache's pixels had.
        each.append(v2.RandomResizedCrop(image_size, scale=(settings.resized_crop, 1.0), ratio=ASPECT, antialias=True))
    if settings.flip:
        each.append(v2.RandomHorizontalFlip())
    if settings.rand_augment:
        each.append(v2.RandAugment(num_ops=settings.rand_augment))
    change = v2.Compose(each) if each else None
    blends: list[v2.Transform] = []
    if settings.mixup:
        blends.append(v2.MixUp(alpha=settings.mixup, num_classes=num_classes))
    if settings.cutmix:
        blends.append(v2.CutMix(alpha=settings.cutmix, num_classes=num_classes))
    blend = v2.RandomChoice(blends) if blends else None

    def augment(images_BHWC: torch.Tensor, labels_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images_BCHW = images_BHWC.permute(0, 3, 1, 2)
        targets = labels_B
        if change is not None:
            images_BCHW = torch.stack([change(image_CHW) for image_CHW in images_BCHW])
        if blend is not None and len(labels_B) > 1:
            images_BCHW, targets = blend(images_BCHW.float(), labels_B)
        return images_BCHW.permute(0, 2, 3, 1), targets

    return augment
