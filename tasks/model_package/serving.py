"""The serving form of a network: folded, in the precision of inference, with calibrated probabilities and a score.

Batch norms and activations are folded into the preceding convolutions.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch.fx.experimental.optimization import fuse

from .description import Precision
from .network import ImageNetwork

ALLOCATORS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""Texts by which torch reports on the CPU that memory is used up."""

GPU_LIBRARIES = ("_ALLOC_FAILED", "out of memory", "unable to find an engine to execute this computation")
"""Texts by which cuBLAS and others, CUDA and NCCL, and cuDNN report that the memory of a GPU is used up.

cuDNN has no kernel left whose workspace fits."""

ONEDNN = re.compile(r"could not create a (primitive|memory object)$")
"""Texts of oneDNN, which computes on the CPU, when it gets no memory for its generated code or its buffers.

A "primitive descriptor" that cannot be created is another error: the operation is not supported."""

PACKED_TYPES = (torch.float32, torch.bfloat16)
"""Data types for which oneDNN has kernels with packed weights and activations."""


class PackedConv2d(nn.Module):
    """A convolution, and ReLU or ReLU6 if one follows; (B, C, H, W) to (B, C', H', W').

    On a CPU without gradients oneDNN applies the activation as it writes each output, without a second pass over
    memory. The weights are converted once to the data type and memory layout of its kernel, which may sum in another
    order. Elsewhere the activation follows the convolution.
    """

    def __init__(self, convolution: nn.Conv2d, activation: nn.ReLU | nn.ReLU6 | None) -> None:
        """Keep the layers; the weights are packed at the first call, and must not change after it.

        Args:
            convolution: The convolution, as `_is_packable`.
            activation: The activation of its outputs, or None.
        """
        super().__init__()
        self.convolution = convolution
        self.activation = activation
        self._operation = _OPERATIONS[type(activation)]
        self._packed: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy, which packs the weights again: packed ones have no storage to copy."""
        return self.__dict__ | {"_packed": {}}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the activated outputs, in the data type of autocast or of the inputs."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inputs.dtype
        if torch.is_grad_enabled() or not _is_packed(inputs, dtype):
            outputs: torch.Tensor = self.convolution(inputs)
            return outputs if self.activation is None else self.activation(outputs)
        weight, bias = self._packed.get(dtype) or self._pack(dtype, inputs.shape)
        return torch.ops.mkldnn._convolution_pointwise(  # type: ignore[no-any-return]  # torch does not type it
            inputs.to(dtype), weight, bias, *_geometry(self.convolution), *self._operation, ""
        )

    def _pack(self, dtype: torch.dtype, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor | None]:
        conv = self.convolution
        weight = torch.ops.mkldnn._reorder_convolution_weight(
            conv.weight.detach().to(dtype, memory_format=torch.channels_last), *_geometry(conv), list(shape)
        )
        packed = weight, None if conv.bias is None else conv.bias.detach().to(dtype)
        self._packed[dtype] = packed
        return packed


_OPERATIONS: dict[type[nn.Module] | type[None], tuple[str, list[float]]] = {
    type(None): ("none", []),
    nn.ReLU: ("relu", []),
    nn.ReLU6: ("hardtanh", [0.0, 6.0]),
}
"""Name and arguments of oneDNN's operation on the outputs, by type of the activation."""


def _geometry(conv: nn.Conv2d) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
    """Return padding, stride, dilation and groups."""
    assert not isinstance(conv.padding, str)
    return conv.padding, conv.stride, conv.dilation, conv.groups


def _is_packed(inputs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether oneDNN is available and has a kernel with packed weights for these inputs."""
    return (
        inputs.device.type == "cpu"
        and inputs.dim() == 4
        and dtype in PACKED_TYPES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch does not type it
        and bool(torch.backends.mkldnn.enabled)
        and (dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


def _is_packable(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether the module is a packable convolution; not with NaN weights, as oneDNN silently clamps NaN to 0."""
    return (
        type(module) is nn.Conv2d
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and all(bool(value.isfinite().all()) for value in module.parameters())
    )


def _pack_convolutions(network: fx.GraphModule, head: str) -> fx.GraphModule:
    """Pack each convolution but the head, with the ReLU or ReLU6 that is its only consumer."""
    modules = dict(network.named_modules())
    calls = Counter(node.target for node in network.graph.nodes if node.op == "call_module")
    for node in list(network.graph.nodes):
        if node.op != "call_module" or node.target == head or calls[node.target] > 1:
            continue
        conv = modules[node.target]
        if not _is_packable(conv):
            continue
        activation = None
        for after in list(node.users) if len(node.users) == 1 else []:
            if after.op == "call_module" and type(modules[after.target]) in (nn.ReLU, nn.ReLU6):
                activation = modules[after.target]
                after.replace_all_uses_with(node)
                network.graph.erase_node(after)
        network.set_submodule(node.target, PackedConv2d(conv, activation))
    network.recompile()
    return network


class _ThreadTracer(fx.Tracer):
    """A tracer for one thread: fx replaces calls and attributes of all modules meanwhile, also for other threads."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record the call of a module, or run it if another thread calls it."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Record the use of a parameter, or return it if another thread uses it."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


_TRACES = threading.Lock()
"""Held while a network is traced: of two traces at once, one would leave the other's replacements in place."""


def _traced(network: nn.Module) -> fx.GraphModule:
    """Return a network as a graph of its layers, which it shares; other threads may compute meanwhile."""
    with _TRACES:
        return fx.GraphModule(network, _ThreadTracer().trace(network))


def fold_batch_norm(classifier: ImageNetwork) -> ImageNetwork:
    """Return a classifier for inference with the same logits up to rounding and fewer passes over memory.

    In eval mode a batch norm is y = gamma (x - mean) / sqrt(var + eps) + beta with constants. They scale the weights
    and shift the bias of the convolution that computes x (Jacob et al. 2018, arXiv:1712.05877, section 3.2). On a CPU
    mobilenet_v2 is 1.6 times as fast with folded batch norms, and in bfloat16 another 1.2 times with fused activations.
    Packed weights make a single image 1.5 times as fast (LOG.md).

    The result is a copy in eval mode. A network that is already folded, has no batch norms, or whose code cannot be
    traced or folded, is returned itself, in eval mode.
    """
    kinds = {type(module) for module in classifier.network.modules()}
    if nn.BatchNorm2d not in kinds or PackedConv2d in kinds:
        return classifier.eval()
    name = next(name for name, module in classifier.network.named_modules() if module is classifier.head)
    training = classifier.training
    try:
        fused = fuse(_traced(classifier.network.eval()), no_trace=True)
    except Exception:  # Tracing runs the code of a timm network, which may branch on values that it does not have.
        if not hasattr(classifier.network, "get_classifier"):
            raise
        return classifier.eval()
    assert isinstance(fused, fx.GraphModule)
    read = {node.target.rpartition(".")[0] for node in fused.graph.nodes if node.op == "get_attr"}
    if {type(classifier.network.get_submodule(layer)) for layer in read} & {nn.Conv2d, nn.BatchNorm2d}:
        return classifier.eval()  # Its code reads the weights of layers, which folding replaces.
    network = _pack_convolutions(fused, name)
    classifier.train(training)
    return (
        ImageNetwork(network, network.get_submodule(name), classifier.mean, classifier.std).requires_grad_(False).eval()
    )


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
    served = ImageNetwork(folded.network, folded.head, folded.mean, folded.std).eval()
    served.precision = torch.bfloat16 if precision == "bfloat16" else None
    served.temperature = temperature
    served.pixels_per_pass = PIXELS_PER_PASS
    return served


GAMMA, MAX_CLASSES = 0.1, 100
"""Exponent of the score of images of no class, and the number of most probable classes in it."""


def unknown_scores(logits_BK: torch.Tensor) -> torch.Tensor:
    """Return scores of images of no class, float64 (B,): 0 if a class has all the probability, 1 if all have the same.

    The score is the generalized entropy of Liu, Lochman and Zach, "GEN: Pushing the Limits of Softmax-Based
    Out-of-Distribution Detection", CVPR 2023, with their exponent and number of classes. It needs logits only, so any
    network has it, whichever layers were trained. LOG.md of the benchmarks has distances of features beside it.

    Args:
        logits_BK: Logits of at least two classes, before the temperature divides them: it is fitted together with the
            thresholds, and the score orders images about as well with it.
    """
    num = min(MAX_CLASSES, logits_BK.shape[1])
    probabilities_BM = torch.softmax(logits_BK.double(), dim=1).topk(num, dim=1).values
    sums_B = (probabilities_BM * (1 - probabilities_BM)).pow(GAMMA).sum(dim=1)
    largest = num * (1 / num * (1 - 1 / num)) ** GAMMA
    scores_B: torch.Tensor = (sums_B / largest).clamp(max=1)  # Rounding may lift it above.
    return scores_B


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is used up, of the process or of its GPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and (
        any(text in message for text in ALLOCATORS + GPU_LIBRARIES) or ONEDNN.search(message) is not None
    )
