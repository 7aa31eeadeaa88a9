"""Faster gradients of depthwise convolutions in bfloat16 on a CPU.

oneDNN has no fast kernel for the gradient of the inputs with a stride above 1: it takes 6 to 75 times as long as an
equivalent form. Its kernels for the gradient of the weights are slow for kernels above 3 x 3 (1.3 to 4 times, LOG.md).
The mobile networks of torchvision have four to eleven such layers, which took half of a step of mobilenet_v2.
"""

from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn import functional

LARGEST_FAST_KERNEL = 3
"""Side of the kernel up to which the gradient of its weights is computed in bfloat16."""


class _Geometry(NamedTuple):
    """Geometry of a convolution in pixels, as (height, width)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution of inputs (B, C, H, W) with weights (C, 1, kh, kw), all in bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, given: tuple[Any, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = geometry = _Geometry(*given)
        return functional.conv2d(inputs, weight, bias, *geometry, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        grad_inputs, grad_weight, grad_bias = None, None, None
        if ctx.needs_input_grad[0]:
            grad_inputs = _gradient_of_inputs(gradient, inputs, weight, ctx.geometry)
        if ctx.needs_input_grad[1]:
            grad_weight = _gradient_of_weight(gradient, inputs, weight, ctx.geometry)
        if ctx.needs_input_grad[2]:
            grad_bias = gradient.sum((0, 2, 3), dtype=torch.float32).to(gradient.dtype)
        return grad_inputs, grad_weight, grad_bias, None


def _gradient_of_inputs(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, geometry: _Geometry
) -> torch.Tensor:
    """Return the gradient of the inputs, (B, C, H, W), from that of the outputs, (B, C, H', W').

    It equals the gradient of a convolution of stride 1, with zeros for the outputs that the stride skips.
    """
    stride, padding, dilation = geometry
    if max(stride) > 1:
        kernel = weight.shape[2:]
        is_channels_last = inputs.is_contiguous(memory_format=torch.channels_last)
        sides = [inputs.shape[2 + at] + 2 * padding[at] - dilation[at] * (kernel[at] - 1) for at in (0, 1)]
        spread = torch.empty(
            (*gradient.shape[:2], *sides),
            dtype=gradient.dtype,
            memory_format=torch.channels_last if is_channels_last else torch.contiguous_format,
        )
        spread.zero_()[:, :, :: stride[0], :: stride[1]] = gradient
        gradient = spread
    grad_inputs, _grad_weight = _backward(gradient, inputs, weight, geometry._replace(stride=(1, 1)), (True, False))
    return grad_inputs


def _gradient_of_weight(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, geometry: _Geometry
) -> torch.Tensor:
    """Return the gradient of the weights, (C, 1, kh, kw), computed in float32 for large kernels."""
    dtype = torch.float32 if max(weight.shape[2:]) > LARGEST_FAST_KERNEL else weight.dtype
    converted = gradient.to(dtype), inputs.to(dtype), weight.to(dtype)
    _grad_inputs, grad_weight = _backward(*converted, geometry, (False, True))
    return grad_weight.to(weight.dtype)


def _backward(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, geometry: _Geometry, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's gradients of the inputs and of the weights, computed where `wanted` is true."""
    grad_inputs, grad_weight, _grad_bias = torch.ops.aten.convolution_backward(
        gradient, inputs, weight, None, *geometry, False, (0, 0), len(weight), (*wanted, False)
    )
    return grad_inputs, grad_weight


def _conv_forward(
    self: nn.Conv2d, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the outputs of Conv2d, (B, C, H', W'), with faster gradients under autocast to bfloat16."""
    dtype = torch.bfloat16
    if not (
        inputs.dim() == 4
        and inputs.device.type == "cpu"
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is dtype
    ):
        default: torch.Tensor = nn.Conv2d._conv_forward(self, inputs, weight, bias)
        return default
    with torch.autocast("cpu", enabled=False):
        outputs: torch.Tensor = _Depthwise.apply(
            inputs.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            (self.stride, self.padding, self.dilation),
        )
    return outputs


def _is_slow(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == module.in_channels == module.out_channels > 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and (max(module.stride) > 1 or max(module.kernel_size) > LARGEST_FAST_KERNEL)
    )


def speed_up_depthwise(network: nn.Module) -> int:
    """Replace the gradients of the depthwise convolutions for which oneDNN has no fast kernels.

    Names, weights and classes of the layers do not change, nor does a forward pass without gradients, in float32 or on
    a GPU.

    Returns:
        The number of these layers.
    """
    slow = [module for module in network.modules() if _is_slow(module)]
    for module in slow:
        # Set on the instance instead of in a subclass: torch.fx identifies layers by their class.
        module._conv_forward = partial(_conv_forward, module)  # type: ignore[method-assign]  # replaces the method of this object alone
    return len(slow)
