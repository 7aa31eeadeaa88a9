"""In what number format the network computes, and how many images a step may have on the device at hand."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasks.errors import WrongInput
from tasks.model.network import at_least_two
from tasks.system.cores import free_memory

logger = logging.getLogger("lakevision.train")

MEMORY_SHARE = 0.5
"""Share of the free memory that a forward pass may take on a CPU: the gradients of the backward one, and the buffers
that kernels have for themselves, are no more than as much again."""

OPTIMIZER_COPIES = 2
"""What an optimizer keeps beside the weights, as multiples of them: Adam has two moments."""

GPU_SPARE_SHARE = 0.05
"""Share of a GPU's memory that is left for what a step that is tried does not need: augmentation, Horovod's buffers."""

MAX_AUTO_BATCH = 1024
"""Larger batches generalise worse without a learning rate of their own (Keskar et al. 2017, arXiv:1609.04836)."""

MIN_AUTO_STEPS = 20
"""Steps that `batch_size` auto leaves an epoch: of fewer, an optimizer makes little."""

SAMPLE = 8
"""Images of the forward pass that is measured on a CPU."""


def computes_bf16(device: torch.device) -> bool:
    """Say whether the device has instructions for bfloat16, so that it is faster than float32; a GPU has TF32 then."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Without them torch emulates the format, several times slower.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


MIN_BF16_SIDE = 128
"""Side of the images, in pixels, from which auto computes in bfloat16 on a CPU: on feature maps of one pixel, where
small images end, oneDNN gives gradients of a convolution's weights that are no numbers (resnet18 at 16 pixels)."""


def choose_precision(wanted: str, device: torch.device, image_size: int = MIN_BF16_SIDE) -> torch.dtype | None:
    """Return the number format of the network's sums: bfloat16, or None for that of the weights, float32.

    On a GPU, what stays in float32 takes TF32 in products, unless fp32 is asked for; that is set for the process.

    Args:
        wanted: auto, fp32, tf32 or bf16.
        device: Where it is trained.
        image_size: Side of the images, in pixels.

    Raises:
        WrongInput: bf16 or tf32 is asked for, and the device has no instructions for it.
    """
    able = computes_bf16(device)
    if wanted == "tf32" and not (able and device.type == "cuda"):
        raise WrongInput(
            f"train.precision is 'tf32', which GPUs of compute capability 8.0 and later have, and {device} has not: "
            "set it to auto or fp32"
        )
    if wanted == "bf16" and not able:
        raise WrongInput(f"train.precision is 'bf16' and {device} has no instructions for it: set it to auto or fp32")
    if device.type == "cuda":
        # 10 bits of mantissa, which is more than bfloat16's 7, and the exponents of float32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = able and wanted != "fp32"
    if wanted == "auto" and device.type == "cpu" and image_size < MIN_BF16_SIDE:
        return None
    return torch.bfloat16 if able and wanted in ("auto", "bf16") else None


def precision_name(precision: torch.dtype | None, device: torch.device) -> str:
    """Return the name of a number format as it is logged; None is that of the weights, on a GPU it may be TF32."""
    if precision is None and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(precision or torch.float32).removeprefix("torch.")


def largest_batch(model: nn.Module, example: torch.Tensor, num_rows: int, num_ranks: int, device: torch.device) -> int:
    """Return the largest power of two of images that a step fits into the memory of the device.

    Args:
        model: What is trained, on its device.
        example: What it takes of one image, (H, W, 3) or (F,), of the dtype it takes.
        num_rows: Images of the split `train`, of which an epoch still makes MIN_AUTO_STEPS steps.
        num_ranks: Ranks that share the images, and on a CPU the memory.
        device: Where it is trained.
    """
    bound = max(1, min(MAX_AUTO_BATCH, num_rows // (MIN_AUTO_STEPS * num_ranks)))
    if device.type == "cuda":
        fits = _fits_gpu(model, example, bound, device)
    else:
        free = free_memory() * MEMORY_SHARE / num_ranks
        fits = int(free / max(1, forward_bytes(model, example, SAMPLE) / SAMPLE))
    size = 1 << (max(1, min(bound, fits)).bit_length() - 1)
    logger.info("train.batch_size auto: %d images a step (%d fit, an epoch allows %d)", size, fits, bound)
    return size


def _loss(model: nn.Module, example: torch.Tensor, num_images: int, device: torch.device) -> torch.Tensor:
    inputs = torch.zeros(num_images, *example.shape, dtype=example.dtype, device=device)
    labels = torch.zeros(num_images, dtype=torch.int64, device=device)
    return functional.cross_entropy(model(at_least_two(inputs))[:num_images], labels)  # As a step has it.


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its class
    """Counts the bytes of the tensors that operations make while it is on, each until nothing holds it any more.

    Of views and of what is changed in place it sees the memory that is there already. What a kernel allocates for
    itself it does not see. Modes are described in torch's "Extending PyTorch", "Extending all torch API with Modes".
    """

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        """Count nothing yet, and never the tensors that are `old`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """The most bytes at any one time."""
        self._now = 0
        self._known = {value.untyped_storage().data_ptr() for value in old}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        _types: object,
        given: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and count what it returns."""
        returned = function(*given, **(named or {}))
        for value in tree_leaves(returned):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or place in self._known:
            return
        self._known.add(place)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)  # The next tensor may lie there.
        self._now -= size


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def forward_bytes(model: nn.Module, example: torch.Tensor, num_images: int) -> int:
    """Return the most bytes that all tensors of a forward pass take at once on a CPU, its inputs among them.

    What is kept for the backward pass, and what lives from one layer to the next: a frozen backbone keeps nothing, and
    its largest layers need their memory all the same. Of n times the images it is at most n times as much. Weights
    and batch norm stay as they are.

    Args:
        model: What is trained, on a CPU.
        example: As `largest_batch` has it.
        num_images: Images of the pass.
    """
    before, live = _buffers(model), _LiveBytes(model.state_dict().values())
    model.train()
    with live:  # Within a mode torch runs what an earlier stage compiled as it is.
        _loss(model, example, num_images, torch.device("cpu"))
    _restore(model, before)
    return live.peak


def _fits_gpu(model: nn.Module, example: torch.Tensor, bound: int, device: torch.device) -> int:
    """Return the largest power of two up to `bound` that a whole step is tried with."""
    before = _buffers(model)
    model.train()
    fits = 1
    with suppress(torch.OutOfMemoryError):  # The last one that fitted is what is looked for.
        for size in _sizes_that_fit(model, example, bound, device):
            fits = size
    _restore(model, before)
    torch.cuda.empty_cache()
    return fits


def _sizes_that_fit(model: nn.Module, example: torch.Tensor, bound: int, device: torch.device) -> Iterator[int]:
    trained = sum(value.nbytes for value in model.parameters() if value.requires_grad)
    spare = int(GPU_SPARE_SHARE * torch.cuda.mem_get_info(device)[1])
    # Held while steps are tried: what an optimizer keeps of every weight, and what else comes to a real step.
    _reserve = torch.empty(OPTIMIZER_COPIES * trained + spare, dtype=torch.uint8, device=device)
    size = 1
    while size <= bound:
        _loss(model, example, size, device).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        yield size
        size *= 2


def _restore(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
