"""Precision of the computation, and the largest batch size that fits into the memory of a device."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasks.errors import WrongInput
from tasks.model.training_network import at_least_two, copy_of_buffers, load_buffers
from tasks.model_package.serving import computes_bf16, is_out_of_memory
from tasks.system.cores import free_memory

logger = logging.getLogger("lakevision.train")

MEMORY_SHARE = 0.5
"""Share of the free memory that a forward pass may take on a CPU. The gradients of the backward pass and the internal
buffers of kernels need at most as much again."""

OPTIMIZER_COPIES = 2
"""Memory of an optimizer's state, as a multiple of the weights: Adam has two moments."""

GPU_SPARE_SHARE = 0.05
"""Share of a GPU's memory reserved for needs beyond those of the trial step: augmentation, NCCL's buffers."""

MAX_AUTO_BATCH = 1024
"""Larger batches generalise worse without an adapted learning rate (Keskar et al. 2017, arXiv:1609.04836)."""

MIN_AUTO_STEPS = 20
"""Minimum number of steps per epoch with `batch_size` auto: an optimizer makes little progress in fewer."""

SAMPLE = 8
"""Number of images of the forward pass that is measured on a CPU."""


MIN_BF16_SIDE = 128
"""Side of the images, in pixels, from which auto uses bfloat16 on a CPU. Smaller images end in feature maps of one
pixel, on which oneDNN returns non-finite gradients of a convolution's weights (resnet18 at 16 pixels)."""


def choose_precision(wanted: str, device: torch.device, image_size: int = MIN_BF16_SIDE) -> torch.dtype | None:
    """Return the data type of autocast: bfloat16, float16, or None for float32, the data type of the weights.

    auto takes float16 on GPUs that have units for it, but none for bfloat16, such as T4 and V100.

    On a GPU, float32 matrix products and convolutions use TF32 unless fp32 is requested; the flags are process-wide.

    Args:
        wanted: auto, fp32, tf32, bf16 or fp16.
        device: Device of the model.
        image_size: Side of the images, in pixels.

    Raises:
        WrongInput: bf16 or tf32 is requested, and the device has no instructions for it.
    """
    has_bf16 = computes_bf16(device)
    lacks = ""
    if wanted == "tf32" and not (has_bf16 and device.type == "cuda"):
        lacks = f", which needs a GPU of compute capability 8.0 or later, and the device is {device}"
    elif wanted == "bf16" and not has_bf16:
        lacks = f" and {device} has no instructions for it"
    if lacks:
        cause = f"train.precision is '{wanted}'{lacks}"
        raise WrongInput(cause, setting="train.precision", way_out="set it to auto or fp32")
    if device.type == "cuda":
        # TF32 has 10 bits of mantissa, more than the 7 of bfloat16, and the exponent of float32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = has_bf16 and wanted != "fp32"
    if wanted == "auto" and device.type == "cpu" and image_size < MIN_BF16_SIDE:
        return None
    if wanted == "fp16" or (wanted == "auto" and device.type == "cuda" and not has_bf16 and computes_fp16(device)):
        return torch.float16
    return torch.bfloat16 if has_bf16 and wanted in ("auto", "bf16") else None


def computes_fp16(device: torch.device) -> bool:
    """Return whether a GPU has units for products in float16, from compute capability 7.0 on."""
    return torch.cuda.get_device_capability(device) >= (7, 0)


def precision_name(precision: torch.dtype | None, device: torch.device) -> str:
    """Return the name of a precision as it is logged; None is float32, or TF32 on a GPU where it is allowed."""
    if precision is None and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(precision or torch.float32).removeprefix("torch.")


def largest_batch(
    model: nn.Module,
    example: torch.Tensor,
    num_rows: int,
    num_ranks: int,
    device: torch.device,
    *,
    num_local: int | None = None,
    copies: int = OPTIMIZER_COPIES,
) -> int:
    """Return the largest power of two as batch size with which a step fits into the memory of the device.

    Args:
        model: The model to train, on its device.
        example: The model's input for one image, (H, W, 3) or (F,), in its data type.
        num_rows: Number of images of the split `train`, of which an epoch has at least MIN_AUTO_STEPS steps.
        num_ranks: Number of ranks that share the images.
        device: Device of the model.
        num_local: Number of ranks on this machine, which on a CPU share its memory; None for all of them.
        copies: Memory of optimizer, averages, buckets and kept gradients, as a multiple of the trained weights.
    """
    bound = max(1, min(MAX_AUTO_BATCH, num_rows // (MIN_AUTO_STEPS * num_ranks)))
    if device.type == "cuda":
        fits = _fits_gpu(model, example, bound, device, copies)
    else:
        # Each rank has its own state of the optimizer, and its own buckets.
        free = (free_memory() / (num_local or num_ranks) - copies * trained_bytes(model)) * MEMORY_SHARE
        fits = int(free / max(1, forward_bytes(model, example, SAMPLE) / SAMPLE))
    size = 1 << (max(1, min(bound, fits)).bit_length() - 1)
    logger.info("train.batch_size auto: %d images per step (%d fit, the epoch allows %d)", size, fits, bound)
    return size


def trial_loss(model: nn.Module, example: torch.Tensor, num_images: int, device: torch.device) -> torch.Tensor:
    """Return the loss of a batch of zeros, (), as in a training step.

    Args:
        model: The model.
        example: As in `largest_batch`.
        num_images: Number of images of the batch.
        device: Device of the model.
    """
    inputs = torch.zeros(num_images, *example.shape, dtype=example.dtype, device=device)
    labels = torch.zeros(num_images, dtype=torch.int64, device=device)
    return functional.cross_entropy(model(at_least_two(inputs))[:num_images], labels)  # As in a training step.


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its class
    """Dispatch mode that counts the bytes of the live tensors that operations allocate within it.

    Views and in-place results share memory that is already counted. Internal buffers of kernels are not seen. Modes
    are described in torch's "Extending PyTorch", "Extending all torch API with Modes".
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """Start with a count of zero, without the `existing` tensors."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.peak = 0
        """Maximum number of live bytes."""
        self._current = 0
        self._known = {value.untyped_storage().data_ptr() for value in existing}

    def __torch_dispatch__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the tensors that it returns."""
        returned = func(*args, **(kwargs or {}))
        for value in tree_leaves(returned):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._known:
            return
        self._known.add(address)
        self._current += size
        self.peak = max(self.peak, self._current)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._known.discard(address)  # The next tensor may have the same address.
        self._current -= size


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Let a model train within the block, and drop its gradients and the changes of its buffers after it."""
    before = copy_of_buffers(model)
    model.train()
    yield
    model.zero_grad(set_to_none=True)
    load_buffers(model, before)


def forward_bytes(model: nn.Module, example: torch.Tensor, num_images: int) -> int:
    """Return the peak memory, in bytes, of all tensors of a forward pass on a CPU, including its inputs.

    It includes the tensors saved for the backward pass and the temporary ones: a frozen backbone saves nothing, but its
    largest layers still need memory. With n times the images it is at most n times as much. Weights and batch norm
    statistics are unchanged.

    Args:
        model: The model to train, on a CPU.
        example: As in `largest_batch`.
        num_images: Number of images of the pass.
    """
    live = _LiveBytes(model.state_dict().values())
    with trial(model), live:  # Within a mode torch runs compiled modules uncompiled.
        trial_loss(model, example, num_images, torch.device("cpu"))
    return live.peak


def trained_bytes(model: nn.Module) -> int:
    """Return the size of a model's trained weights, in bytes."""
    return sum(value.nbytes for value in model.parameters() if value.requires_grad)


def _fits_gpu(model: nn.Module, example: torch.Tensor, bound: int, device: torch.device, copies: int) -> int:
    """Return the largest power of two up to `bound` as batch size with which a full step succeeds."""
    spare = int(GPU_SPARE_SHARE * torch.cuda.mem_get_info(device)[1])
    fits, size, reserve = 1, 1, torch.empty(0)
    with trial(model):
        try:
            # Held during the trial steps: the memory of the optimizer's state and of other needs of a training step.
            reserve = torch.empty(copies * trained_bytes(model) + spare, dtype=torch.uint8, device=device)
            while size <= bound:
                trial_loss(model, example, size, device).backward()  # type: ignore[no-untyped-call]  # torch does not type backward
                model.zero_grad(set_to_none=True)
                fits, size = size, 2 * size
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):  # Else the last size that succeeded is the result.
                raise
    del reserve
    torch.cuda.empty_cache()
    return fits
