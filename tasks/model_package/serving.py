"""The serving form of a network: folded, in the precision of inference, with calibrated probabilities."""

import torch

from .description import Precision
from .fold import fold_batch_norm
from .network import ImageNetwork

PIXELS_PER_PASS = 8 * 224 * 224
"""Pixels of the images that a CPU computes at once per thread: their features stay in its caches between the layers
(LOG.md)."""


def computes_bf16(device: torch.device) -> bool:
    """Return whether the device has bfloat16 instructions, faster than float32; such a GPU has TF32 as well."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Without them torch emulates bfloat16, which is several times slower.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def available_precision(wanted: Precision, device: torch.device) -> Precision:
    """Return the precision in which a device serves a model: float32 where it has no instructions for bfloat16."""
    return wanted if wanted == "float32" or computes_bf16(device) else "float32"


def serving_network(network: ImageNetwork, precision: Precision, temperature: float) -> ImageNetwork:
    """Return a network for inference, in eval mode; `network` keeps its precision and its temperature.

    Args:
        network: The trained network. Its layers are shared if there is nothing to fold.
        precision: Number format of the computations.
        temperature: Divisor of the logits.
    """
    folded = fold_batch_norm(network)
    served = ImageNetwork(folded.network, folded.head).eval()
    served.precision = torch.bfloat16 if precision == "bfloat16" else None
    served.temperature = temperature
    served.pixels_per_pass = PIXELS_PER_PASS
    return served
