"""In what number format the network computes, and how many pictures a step may have on the device at hand."""

import logging
from collections.abc import Iterator
from contextlib import suppress

import psutil
import torch
from torch import nn
from torch.nn import functional

from tasks.errors import WrongInput
from tasks.train.model import Classifier

logger = logging.getLogger("lakevision.train")

MEMORY_SHARE = 0.5
"""Share of the free memory that a step's activations may take on a CPU: what else a step allocates is about as much."""

OPTIMIZER_COPIES = 2
"""What an optimizer keeps beside the weights, as multiples of them: Adam has two moments."""

GPU_SPARE_SHARE = 0.05
"""Share of a GPU's memory that is left for what a step that is tried does not need: augmentation, Horovod's buffers."""

MAX_AUTO_BATCH = 1024
"""Larger batches generalise worse without a learning rate of their own (Keskar et al. 2017, arXiv:1609.04836)."""

MIN_AUTO_STEPS = 20
"""Steps that `batch_size` auto leaves an epoch: of fewer, an optimizer makes little."""

SAMPLE = 8
"""Pictures of the forward pass that is measured on a CPU."""


def computes_bf16(device: torch.device) -> bool:
    """Say whether the device has instructions for bfloat16, so that it is faster than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Without them torch emulates the format, several times slower.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


MIN_BF16_SIDE = 128
"""Side of the pictures, in pixels, from which auto computes in bfloat16 on a CPU: on feature maps of one pixel, where
small pictures end, oneDNN gives gradients of a convolution's weights that are no numbers (resnet18 at 16 pixels)."""


def choose_precision(wanted: str, device: torch.device, image_size: int = MIN_BF16_SIDE) -> torch.dtype | None:
    """Return the number format of the network's sums: bfloat16, or None for that of the weights, float32.

    Args:
        wanted: auto, fp32 or bf16.
        device: Where it is trained.
        image_size: Side of the pictures, in pixels.

    Raises:
        WrongInput: bf16 is asked for, and the device would emulate it.
    """
    able = computes_bf16(device)
    if wanted == "bf16" and not able:
        raise WrongInput(f"train.precision is 'bf16' and {device} has no instructions for it: set it to auto or fp32")
    if device.type == "cuda":
        # Sums that stay in float32 may use TF32, whose 10 bits of mantissa are more than bfloat16's 7.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted != "fp32"
    if wanted == "auto" and device.type == "cpu" and image_size < MIN_BF16_SIDE:
        return None
    return torch.bfloat16 if able and wanted != "fp32" else None


def precision_name(precision: torch.dtype | None) -> str:
    """Return the name of a number format as it is logged; None is that of the weights."""
    return str(precision or torch.float32).removeprefix("torch.")


def largest_batch(classifier: Classifier, image_size: int, num_rows: int, num_ranks: int, device: torch.device) -> int:
    """Return the largest power of two of pictures that a step fits into the memory of the device.

    Args:
        classifier: What is trained, on its device.
        image_size: Side of the pictures, in pixels.
        num_rows: Pictures of the split `train`, of which an epoch still makes MIN_AUTO_STEPS steps.
        num_ranks: Ranks that share the pictures, and on a CPU the memory.
        device: Where it is trained.
    """
    bound = max(1, min(MAX_AUTO_BATCH, num_rows // (MIN_AUTO_STEPS * num_ranks)))
    if device.type == "cuda":
        fits = _fits_gpu(classifier, image_size, bound, device)
    else:
        free = psutil.virtual_memory().available * MEMORY_SHARE / num_ranks
        fits = int(free / max(1, activation_bytes(classifier, image_size, SAMPLE) / SAMPLE))
    size = 1 << (max(1, min(bound, fits)).bit_length() - 1)
    logger.info("train.batch_size auto: %d pictures a step (%d fit, an epoch allows %d)", size, fits, bound)
    return size


def _step(classifier: Classifier, image_size: int, num_pictures: int, device: torch.device) -> None:
    images = torch.zeros(num_pictures, image_size, image_size, 3, dtype=torch.uint8, device=device)
    labels = torch.zeros(num_pictures, dtype=torch.int64, device=device)
    functional.cross_entropy(classifier(images), labels).backward()  # type: ignore[no-untyped-call]


def _without_traces(classifier: Classifier) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in classifier.named_buffers()}


def activation_bytes(classifier: Classifier, image_size: int, num_pictures: int) -> int:
    """Return the bytes that a forward pass keeps for the backward one; weights and batch norm stay as they are."""
    seen: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return value

    weights = {value.untyped_storage().data_ptr() for value in classifier.state_dict().values()}
    before = _without_traces(classifier)
    classifier.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        _step(classifier, image_size, num_pictures, torch.device("cpu"))
    _restore(classifier, before)
    return sum(size for place, size in seen.items() if place not in weights)


def _fits_gpu(classifier: Classifier, image_size: int, bound: int, device: torch.device) -> int:
    """Return the largest power of two up to `bound` that a whole step is tried with."""
    before = _without_traces(classifier)
    classifier.train()
    fits = 1
    with suppress(torch.OutOfMemoryError):  # The last one that fitted is what is looked for.
        for size in _sizes_that_fit(classifier, image_size, bound, device):
            fits = size
    _restore(classifier, before)
    torch.cuda.empty_cache()
    return fits


def _sizes_that_fit(classifier: Classifier, image_size: int, bound: int, device: torch.device) -> Iterator[int]:
    trained = sum(value.nbytes for value in classifier.parameters() if value.requires_grad)
    spare = int(GPU_SPARE_SHARE * torch.cuda.mem_get_info(device)[1])
    # Held while steps are tried: what an optimizer keeps of every weight, and what else comes to a real step.
    _reserve = torch.empty(OPTIMIZER_COPIES * trained + spare, dtype=torch.uint8, device=device)
    size = 1
    while size <= bound:
        _step(classifier, image_size, size, device)
        classifier.zero_grad(set_to_none=True)
        yield size
        size *= 2


def _restore(classifier: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    classifier.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, value in classifier.named_buffers():
            value.copy_(buffers[name])
