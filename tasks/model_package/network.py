"""The network of a model package: a classifier of torchvision or timm on uint8 images, which it normalizes."""

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode

from .description import IMAGENET_MEAN, IMAGENET_STD, TIMM, Channels

IMAGENET_CLASSES = 1000

AUXILIARY = ("aux1", "aux2", "AuxLogits")
"""Auxiliary classifiers of googlenet and inception_v3, which are removed: the loss here gives them no gradient."""


class ImageNetwork(nn.Module):
    """A network on uint8 images.

    Attributes:
        head: The last layer.
        mean: Mean of the channels (0-1) that the images are normalized with.
        std: Their standard deviation.
        precision: Data type of autocast; None computes in the data type of the weights. Logits are always float32.
        temperature: Divisor of the logits, with which probabilities are calibrated; 1 leaves them unchanged.
        pixels_per_pass: Pixels of the images that a CPU computes at once per thread; None for all of a batch.
    """

    head: nn.Module
    precision: torch.dtype | None = None
    temperature: float = 1.0
    pixels_per_pass: int | None = None

    def __init__(
        self, network: nn.Module, head: nn.Module, mean: Channels = IMAGENET_MEAN, std: Channels = IMAGENET_STD
    ) -> None:
        super().__init__()
        self.network = network
        self.mean, self.std = mean, std
        # Not a registered module: its parameters are the network's own.
        self.__dict__["head"] = head

    def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, K), of uint8 images (B, H, W, 3)."""
        if self.pixels_per_pass is None or images_BHWC.device.type != "cpu":
            return self._pass(images_BHWC)
        height, width = images_BHWC.shape[1:3]
        pixels = self.pixels_per_pass * torch.get_num_threads()
        parts = torch.split(images_BHWC, max(1, pixels // (height * width)))
        return torch.cat([self._pass(part) for part in parts])

    def _pass(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        inputs = normalize(images_BHWC, self.mean, self.std)
        with torch.autocast(inputs.device.type, self.precision, enabled=self.precision is not None):
            logits = self.network(inputs)
        logits_BK: torch.Tensor = logits.float()
        return logits_BK if self.temperature == 1 else logits_BK / self.temperature


def normalize(images_BHWC: torch.Tensor, mean: Channels = IMAGENET_MEAN, std: Channels = IMAGENET_STD) -> torch.Tensor:
    """Normalize with a mean and a standard deviation of each channel.

    Args:
        images_BHWC: uint8 (or float32 from 0 to 255), shape (B, H, W, 3); not modified.
        mean: Mean of the channels (0-1).
        std: Their standard deviation.

    Returns:
        float32, shape (B, 3, H, W), in channels-last memory format, as the permutation copies nothing.
    """
    images_BCHW = images_BHWC.permute(0, 3, 1, 2).to(torch.float32, copy=True)
    return images_BCHW.sub_(_per_channel(mean, images_BCHW)).div_(_per_channel(std, images_BCHW))


def _per_channel(values: Channels, images_BCHW: torch.Tensor) -> torch.Tensor:
    # Filled on the device: a tensor of numbers is copied to it, which on a GPU waits for everything before.
    return torch.stack([images_BCHW.new_full((), value) for value in values]).mul_(255).view(1, -1, 1, 1)


class NoHead(ValueError):
    """A network without one layer of logits, which could be replaced."""


def new_network(name: str, side: int | None = None) -> nn.Module:
    """Return a classifier with random weights and a head of IMAGENET_CLASSES outputs.

    Args:
        name: Its name in torchvision, or TIMM and its name in timm.
        side: Side in pixels of the only images that a vision transformer of torchvision takes; None: 224.
    """
    if name.startswith(TIMM):
        import timm  # Takes seconds.

        timm_network: nn.Module = timm.create_model(name.removeprefix(TIMM), num_classes=IMAGENET_CLASSES)
        return timm_network
    # These two come from TensorFlow and use other means; torchvision sets the option only when it loads weights itself.
    options: dict[str, Any] = {"transform_input": True} if name in {"googlenet", "inception_v3"} else {}
    if side is not None and name.startswith("vit_"):
        options["image_size"] = side
    network: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return network


def replace_head(network: nn.Module, num_classes: int) -> nn.Module:
    """Replace the layer of the logits by a new one of `num_classes` outputs, and return it.

    Auxiliary classifiers are removed.

    Raises:
        NoHead: A network of timm has no such layer, or several.
    """
    for name in AUXILIARY:
        if getattr(network, name, None) is not None:
            setattr(network, name, None)
            network.aux_logits = False  # type: ignore[assignment]  # an attribute that only some networks have
    last = last_layer(network)
    old = network.get_submodule(last)
    assert isinstance(old, nn.Conv2d | nn.Linear), "it is one of the two"
    head: nn.Module = (
        nn.Linear(old.in_features, num_classes)
        if isinstance(old, nn.Linear)
        else nn.Conv2d(old.in_channels, num_classes, kernel_size=1)
    )
    parent, _, attribute = last.rpartition(".")
    setattr(network.get_submodule(parent), attribute, head)
    return head


class WithoutMemory(TorchFunctionMode):
    """Function mode in which a network's parameters are built on the meta device, with shapes and types but no data.

    `torch.device("meta")` would also affect the tensors from which RegNet computes its widths.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with the meta device for `torch.empty`."""
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


def build_network(
    name: str,
    num_classes: int,
    side: int | None = None,
    mean: Channels = IMAGENET_MEAN,
    std: Channels = IMAGENET_STD,
) -> ImageNetwork:
    """Return a network with random weights; the side is that of `new_network`."""
    network = new_network(name, side)
    return ImageNetwork(network, replace_head(network, num_classes), mean, std)


def last_layer(network: nn.Module) -> str:
    """Return the name of the layer of the logits.

    It is what timm names as the classifier, or torchvision's last Linear or Conv2d layer with one output per class.

    Raises:
        NoHead: timm names no layer, or several, as for a distilled network, or the network only computes features.
    """
    if (get_classifier := getattr(network, "get_classifier", None)) is not None:
        classifier = get_classifier()
        found: list[str] = [name for name, module in network.named_modules() if module is classifier]
        if not found or not isinstance(classifier, nn.Linear | nn.Conv2d):
            raise NoHead(f"its classifier is of type {type(classifier).__name__}, not one layer")
        return found[0]
    names: list[str] = [
        name
        for name, module in network.named_modules()
        if (isinstance(module, nn.Linear) and module.out_features == IMAGENET_CLASSES)
        or (isinstance(module, nn.Conv2d) and module.out_channels == IMAGENET_CLASSES)
    ]
    if not names:
        raise NoHead("it has no layer of logits")
    return names[-1]
