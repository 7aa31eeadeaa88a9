"""Normalization of the cache's pixels for a network."""

import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels (RGB, 0-1), with which torchvision's weights were trained."""


def normalize(images_BHWC: torch.Tensor) -> torch.Tensor:
    """Normalize with ImageNet's mean and standard deviation.

    Args:
        images_BHWC: uint8 (or float32 from 0 to 255), shape (B, H, W, 3); not modified.

    Returns:
        float32, shape (B, 3, H, W), in channels-last memory format, as the permutation copies nothing.
    """
    images_BCHW = images_BHWC.permute(0, 3, 1, 2).to(torch.float32, copy=True)
    return images_BCHW.sub_(_per_channel(IMAGENET_MEAN, images_BCHW)).div_(_per_channel(IMAGENET_STD, images_BCHW))


def _per_channel(values: tuple[float, ...], images_BCHW: torch.Tensor) -> torch.Tensor:
    # Filled on the device: a tensor of numbers is copied to it, which on a GPU waits for everything before.
    return torch.stack([images_BCHW.new_full((), value) for value in values]).mul_(255).view(1, -1, 1, 1)
