"""Histograms of the layers for TensorBoard, once per epoch: their outputs, and the norms of their gradients."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial

import torch
from torch import nn

from tasks.cache.loader import CacheLoader
from tasks.errors import loggable
from tasks.progress.activity import working

logger = logging.getLogger("lakevision.train")

MAX_VALUES = 1 << 16
"""Values of a layer's outputs in its histogram: TensorBoard sorts them into 1,500 bins on the CPU."""

LogHistograms = Callable[[int, Mapping[str, torch.Tensor]], None]
"""Takes the number of an epoch, and the values of its histograms by tag, float32 of any length."""


class LayerHistograms:
    """Notes the gradients of the steps, and logs the histograms of an epoch.

    It does not affect training: the outputs are those of a forward pass of its own, without dropout, of the first batch
    of `val`, the same one in all epochs.
    """

    def __init__(self, model: nn.Module, loader: CacheLoader, device: torch.device, log: LogHistograms) -> None:
        """Note nothing yet.

        Args:
            model: The trained model.
            loader: Batches of `val`.
            device: Device of the model.
            log: Takes the histograms.
        """
        self._model, self._loader, self._device, self._log = model, loader, device, log
        # A model that is only the head has itself as its layer.
        self._layers = {
            name or "head": layer
            for name, layer in model.named_modules()
            if next(layer.parameters(recurse=False), None) is not None
        }
        self._norms: list[torch.Tensor] = []  # Per step, float32 (L,), of all layers: each tensor takes 512 bytes.

    def after_step(self) -> None:
        """Note the norms of the gradients, as they were clipped."""
        norms_L, frozen = [], torch.full((), math.nan, device=self._device)
        for layer in self._layers.values():
            gradients = [own.grad for own in layer.parameters(recurse=False) if own.grad is not None]
            norms_L.append(nn.utils.get_total_norm(gradients).float() if gradients else frozen)
        self._norms.append(torch.stack(norms_L))

    def end_epoch(self, epoch: int) -> None:
        """Log the histograms of an epoch, of its steps in this process; a failure is logged, and training continues."""
        columns = torch.stack(self._norms).unbind(1) if self._norms else ()
        norms = {f"gradient_norms/{name}": column for name, column in zip(self._layers, columns, strict=False)}
        self._norms.clear()
        with working("logging histograms"):
            try:
                outputs = {f"activations/{name}": values for name, values in self._outputs().items()}
                finite = {tag: values[values.isfinite()].cpu() for tag, values in (norms | outputs).items()}
                self._log(epoch, {tag: values for tag, values in finite.items() if len(values)})
            except Exception as error:
                logger.warning("the histograms of epoch %d were not logged: %s", epoch, loggable(error))

    def _outputs(self) -> dict[str, torch.Tensor]:
        """Return a sample of the outputs of each layer, by its name; none without images on this rank."""
        found: dict[str, torch.Tensor] = {}

        def keep(name: str, _layer: nn.Module, _inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                values = first.detach().flatten()
                # An odd stride, so that it has not the same places of each channel.
                found[name] = values[:: math.ceil(len(values) / MAX_VALUES) | 1].float()

        with closing(self._loader.epoch(0)) as batches:
            inputs = next((batch.inputs for batch in batches if len(batch.inputs)), None)
        if inputs is None:
            return found
        hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in self._layers.items()]
        was_training = self._model.training
        self._model.eval()
        # A compiled network would be compiled again, with the hooks. Importing the compiler takes seconds.
        is_compiled = any(module._compiled_call_impl is not None for module in self._model.modules())
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
                self._model(inputs.to(self._device))
        finally:
            self._model.train(was_training)
            for hook in hooks:
                hook.remove()
        return found
