"""Heat maps of predictions: how much each place of an image speaks for a class, by Grad-CAM, for any network.

Own code and not captum's: its `LayerGradCam` takes a layer that the caller names, and no transformer's tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from tasks.model_package.network import ImageNetwork


class HeatMaps:
    """Grad-CAM of one network.

    The map of a class is the sum of the last layer's channels that has places, each weighted by the mean gradient of
    the class's logit, without its negative part: Selvaraju et al., "Grad-CAM", ICCV 2017, arXiv:1610.02391, equations 1
    and 2.

    Attributes:
        layer: Name of that layer, by `spatial_layer`.
    """

    def __init__(self, network: ImageNetwork, side: int) -> None:
        """Find the layer of a network.

        Args:
            network: The trained network, not the folded one of inference, through which no gradient flows.
            side: Side of its images, in pixels.

        Raises:
            ValueError: As `spatial_layer`.
        """
        self._network = network.eval().requires_grad_(False)
        self._network.pixels_per_pass = None
        self.layer = spatial_layer(network, side)

    def __call__(self, images_BHWC: torch.Tensor, classes: Sequence[int]) -> torch.Tensor:
        """Return the maps, float32 (B, H, W) from 0 to 1, the largest value of each; 0 where nothing speaks for it.

        Args:
            images_BHWC: uint8 images.
            classes: Index of the class of each image.
        """
        found: list[torch.Tensor] = []

        def cut(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            found.append(output.detach().requires_grad_())
            return found[0].clone()  # Later layers may change it in place, which a leaf does not permit.

        handle = self._network.get_submodule(self.layer).register_forward_hook(cut)
        try:
            with torch.enable_grad():
                logits_BK = self._network(images_BHWC)
                chosen_B = logits_BK[torch.arange(len(images_BHWC)), torch.as_tensor(classes)]
                (gradient,) = torch.autograd.grad(chosen_B.sum(), found)
        finally:
            handle.remove()
        activation_BCHW, gradient_BCHW = places_of(found[0].detach()), places_of(gradient)
        assert activation_BCHW is not None, "the layer was chosen by its places"
        assert gradient_BCHW is not None, "a gradient has the shape of its tensor"
        weights_BC11 = gradient_BCHW.mean(dim=(2, 3), keepdim=True)
        maps_B1HW = (weights_BC11 * activation_BCHW).sum(dim=1, keepdim=True).float().relu()
        size = images_BHWC.shape[1:3]
        maps_BHW = nn.functional.interpolate(maps_B1HW, size, mode="bilinear", align_corners=False)[:, 0]
        return maps_BHW / maps_BHW.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def places_of(output: object) -> torch.Tensor | None:
    """Return the output of a layer by places, (B, C, H, W) with more than one place; None if it has none.

    Images are (B, C, H, W) or (B, H, W, C), and tokens (B, H * W, C), before which may be one of the class.
    """
    if not isinstance(output, torch.Tensor):
        return None
    shape = output.shape
    if len(shape) == 4 and shape[2] == shape[3] > 1:
        return output
    if len(shape) == 4 and shape[1] == shape[2] > 1:
        return output.permute(0, 3, 1, 2)
    if len(shape) != 3:
        return None
    for num_others in (0, 1):
        side = math.isqrt(shape[1] - num_others)
        if side > 1 and side * side == shape[1] - num_others:
            return output[:, num_others:].transpose(1, 2).reshape(shape[0], shape[2], side, side)
    return None


def spatial_layer(network: ImageNetwork, side: int) -> str:
    """Return the name of the last layer whose output has places, more than one of which the logits depend on.

    A vision transformer's head sees its last tokens only through that of the class: the layer is then the one before
    its last attention.

    Args:
        network: A network in eval mode.
        side: Side of its images, in pixels.

    Raises:
        ValueError: It has no such layer.
    """
    outputs: list[tuple[str, torch.Tensor]] = []
    calls: Counter[str] = Counter()
    width = getattr(network.head, "in_features", None)

    def note(name: str, output: object) -> None:
        calls[name] += 1
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        # Of a transformer's tensors, those with the width of its head: the others are queries, keys and values.
        if output.ndim != 3 or output.shape[2] == width:
            outputs.append((name, output))

    def hook_of(name: str) -> torch.utils.hooks.RemovableHandle:
        return network.get_submodule(name).register_forward_hook(lambda _module, _in, output: note(name, output))

    handles = [hook_of(name) for name, _module in network.named_modules() if name]
    try:
        with torch.enable_grad():
            # Two images, so that the batch is not taken for a place; noise, so that no gradient is 0 by symmetry.
            noise = torch.rand((2, side, side, 3), generator=torch.Generator().manual_seed(0)) * 255
            device = next(network.parameters()).device
            logits_BK = network(noise.to(device).requires_grad_())
            tensors = [output for _name, output in outputs]
            gradients = torch.autograd.grad(logits_BK.amax(dim=1).sum(), tensors, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for (name, output), gradient in zip(reversed(outputs), reversed(gradients), strict=True):
        by_place = places_of(gradient)
        # A layer that is called several times, as one ReLU of a block, has no output of its own.
        if by_place is None or calls[name] > 1 or len(output) != len(noise):
            continue
        if int((by_place[0].abs().amax(dim=0) > 0).sum()) > 1:
            return name
    raise ValueError("the network has no layer with places, so its predictions have no heat maps")
