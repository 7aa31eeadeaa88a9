"""Batch norm over the batches of all ranks, on CPUs and GPUs.

torch's and Horovod's own layers need a GPU, and change the types of a network's layers, which folding and the model
package depend on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tasks.collectives.reducer import Reducer


class SyncBatchNorm(TorchFunctionMode):
    """Context in which batch norms in training mode take their statistics over the batches of all ranks.

    Every rank runs the same layers forward and backward: each is two collective operations. With them n ranks compute
    what one process computes on their batches together (Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1).
    Layers in eval mode, such as frozen ones, and a forward pass outside of the context stay as they are.
    """

    def __init__(self, reducer: Reducer, num_rows: int) -> None:
        """Prepare the forward pass of a batch.

        Args:
            reducer: The ranks.
            num_rows: Rows of this rank's batch that count; the others are padding. May be 0.
        """
        super().__init__()
        self._reducer = reducer
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or the synchronized batch norm in its place."""
        if func is functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        inputs: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return functional.batch_norm(inputs, running_mean, running_var, weight, bias, training, momentum, eps)
        outputs: torch.Tensor
        outputs, mean_C, var_C, count = _Normalize.apply(inputs, self._reducer, self._num_rows, eps)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean_C.to(running_mean.dtype), momentum)
            if running_var is not None:
                # One process would pass a copy of a single row, too: see `at_least_two`.
                counted = torch.where(count == inputs[0, 0].numel(), 2 * count, count)
                unbiased_C = var_C * (counted / (counted - 1))
                running_var.lerp_(unbiased_C.to(running_var.dtype), momentum)
        shape = _per_channel(inputs)
        if weight is not None:
            outputs = outputs * weight.view(shape)
        if bias is not None:
            outputs = outputs + bias.view(shape)
        return outputs.to(inputs.dtype)


class _Normalize(torch.autograd.Function):
    """Normalization of (B, C, ...) to mean 0 and variance 1 per channel, over the batches of all ranks, in float32."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, reducer: Reducer, num_rows: int, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean_C, var_C, count = _moments(inputs[:num_rows], reducer)
        shape = _per_channel(inputs)
        scale_C = (var_C + eps).rsqrt()
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        normalized = (inputs.to(dtype) - mean_C.to(dtype).view(shape)) * scale_C.to(dtype).view(shape)
        ctx.save_for_backward(normalized, scale_C, count)
        ctx.reducer, ctx.num_rows, ctx.dtype = reducer, num_rows, inputs.dtype
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return normalized, mean_C, var_C, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_others: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalized, scale_C, count = ctx.saved_tensors
        dims = _dims(gradient)
        own, own_gradient = normalized[: ctx.num_rows], gradient[: ctx.num_rows]
        # The mean and variance depend on the inputs of all ranks, and so do the losses of all ranks on these inputs.
        sums = ctx.reducer.sum(
            torch.stack(
                [own_gradient.sum(dims, dtype=torch.float64), (own_gradient * own).sum(dims, dtype=torch.float64)]
            )
        )
        shape = _per_channel(gradient)
        of_mean, of_var = ((each / count).to(gradient.dtype).view(shape) for each in sums)
        inputs_gradient = gradient.clone()
        inputs_gradient[: ctx.num_rows] -= of_mean + own * of_var
        inputs_gradient *= scale_C.to(gradient.dtype).view(shape)
        return inputs_gradient.to(ctx.dtype), None, None, None


def _moments(inputs: torch.Tensor, reducer: Reducer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance (C,) and count () of the values per channel over all ranks, float64."""
    dims = _dims(inputs)
    count = inputs.numel() // inputs.shape[1]
    sums = torch.zeros(2 * inputs.shape[1] + 1, dtype=torch.float64, device=inputs.device)
    if count:
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        var_C, mean_C = torch.var_mean(inputs.to(dtype), dims, correction=0)
        mean_C, var_C = mean_C.double(), var_C.double()
        sums = torch.cat([count * mean_C, count * (var_C + mean_C.square()), sums.new_full((1,), count)])
    summed = reducer.sum(sums)
    total = summed[-1]
    mean_C, squares_C = (summed[:-1] / total).chunk(2)
    return mean_C, (squares_C - mean_C.square()).clamp(min=0), total


def _dims(inputs: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor (B, C, ...) other than the channels."""
    return [dim for dim in range(inputs.dim()) if dim != 1]


def _per_channel(inputs: torch.Tensor) -> list[int]:
    """Return the shape by which a tensor (C,) is broadcast over (B, C, ...)."""
    return [1, -1] + [1] * (inputs.dim() - 2)
