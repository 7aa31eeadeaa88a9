"""Differences between the predictions of one network in two precisions."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from tasks.collectives import Reducer
from tasks.metrics.evaluate import Loader, logits_of

MAX_IMAGES = 512
"""Number of images that are compared: in float32 a network may take several times as long."""


@dataclass(frozen=True)
class PrecisionDifference:
    """Differences between the predictions of a network in its serving precision and in float32."""

    images: int
    """Number of compared images."""
    mean: float
    """Mean over images of the absolute difference of the probability of the served label."""
    largest: float
    """Maximum of that difference."""
    changed_labels: int
    """Number of images with different labels."""


def compare_precisions(
    served: nn.Module, exact: nn.Module, loader: Loader, device: torch.device, reducer: Reducer
) -> PrecisionDifference:
    """Return the differences on the first MAX_IMAGES images of a split over all ranks; a collective operation.

    Args:
        served: The network in its serving precision.
        exact: The same network in float32.
        loader: Batches of the split.
        device: Device of the networks.
        reducer: The other ranks.
    """
    most = math.ceil(MAX_IMAGES / reducer.num_ranks)
    sums, largest = torch.zeros(3, dtype=torch.float64), 0.0
    with torch.inference_mode():
        for batch, _labels_B, logits_BK in logits_of(served, loader, device):
            label_B = logits_BK.argmax(1)
            exact_BK = exact(batch.inputs.to(device))
            served_B, exact_B = (
                torch.softmax(one_BK.double(), dim=1).gather(1, label_B[:, None])[:, 0]
                for one_BK in (logits_BK, exact_BK)
            )
            difference_B = (served_B - exact_B).abs().cpu()
            changed = (exact_BK.argmax(1) != label_B).sum().cpu()
            sums += torch.stack([torch.tensor(float(len(label_B))), difference_B.sum(), changed.float()])
            largest = max(largest, float(difference_B.max()))
            if sums[0] >= most:
                break
    num_images, difference, changed_labels = reducer.sum(sums).tolist()
    largest_of_ranks = torch.zeros(reducer.num_ranks, dtype=torch.float64)
    largest_of_ranks[reducer.rank] = largest
    return PrecisionDifference(
        images=int(num_images),
        mean=difference / max(num_images, 1),
        largest=float(reducer.sum(largest_of_ranks).max()),
        changed_labels=int(changed_labels),
    )
