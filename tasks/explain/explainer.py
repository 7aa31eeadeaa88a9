"""Explanations of a model package: an image, its most probable class or another one, and the heat map of that class."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from tasks.explain.grad_cam import HeatMaps
from tasks.model_package.classifier import load_network
from tasks.model_package.decode import decode_image, encode_jpeg, fit_within, fitted_size, letterbox

logger = logging.getLogger("lakevision.explain")

SIDE = 448
"""Longest side of an explained image, in pixels."""

QUALITY = 85

BATCH = 8
"""Images whose heat maps are computed at once."""

COLOURS = ((0.0, (32, 0, 110)), (0.35, (150, 30, 130)), (0.65, (245, 110, 50)), (1.0, (255, 235, 90)))
"""Colours of a heat map by its value, from dark to bright, so that they differ in grey as well."""

OPACITY = 0.65
"""Share of the colour where the map is 1; 0 where it is 0."""


class HeatOfPackage(NamedTuple):
    """The heat maps of a model package for images of a cache.

    Attributes:
        folder: Folder of the model package.
        device: Device of the computations.
    """

    folder: Path
    device: torch.device

    def beside(self, images_NHWC: torch.Tensor, classes: Sequence[int]) -> torch.Tensor:
        """Return images, uint8 (N, H, 2 W, 3), each with the heat map of a class beside it.

        They are returned as they are if the network has no layer with places.

        Args:
            images_NHWC: uint8 images of the model's size.
            classes: Index of the class of each image.
        """
        network, description = load_network(self.folder)
        try:
            maps = HeatMaps(network.to(self.device), description.image_size)
        except ValueError as error:
            logger.warning("%s", error)
            return images_NHWC
        begins = range(0, len(classes), BATCH)
        parts = [(images_NHWC[begin : begin + BATCH], classes[begin : begin + BATCH]) for begin in begins]
        maps_NHW = torch.cat([maps(images.to(self.device), chosen).cpu() for images, chosen in parts])
        heat = [torch.from_numpy(blend(*pair)) for pair in zip(images_NHWC.numpy(), maps_NHW.numpy(), strict=True)]
        return torch.cat([images_NHWC, torch.stack(heat)], dim=2)


class Explanation(NamedTuple):
    """A heat map over an image.

    Attributes:
        label: The class that it is for.
        probability: Its probability (0-1), calibrated.
        jpeg: The image with the heat map, encoded, its longest side SIDE pixels.
    """

    label: str
    probability: float
    jpeg: bytes


class Explainer:
    """Explanations by one model package, in float32, whatever its precision: gradients need the trained network.

    Attributes:
        classes: Names of the classes.
    """

    def __init__(self, folder: Path) -> None:
        """Load the network of a model package.

        Args:
            folder: Folder of the model package.

        Raises:
            InvalidPackage: As `ImageClassifier.load`.
            ValueError: As `HeatMaps`.
        """
        self._network, self._description = load_network(folder)
        self.classes = self._description.classes
        self._maps = HeatMaps(self._network, self._description.image_size)

    def explain(self, content: bytes, label: str | None = None) -> Explanation:
        """Explain an image.

        Args:
            content: The encoded image.
            label: The class; None for the most probable one.

        Raises:
            BadImage: The image cannot be decoded.
            ValueError: The model has no such class.
        """
        if label is not None and label not in self.classes:
            raise ValueError(f"'{label[:100]}' is not a class of the model")
        side = self._description.image_size
        image = decode_image(content, box=max(SIDE, side), decoding=self._description.decoding)
        pixels_BHWC = torch.from_numpy(letterbox(image, side).copy())[None]
        with torch.inference_mode():
            logits_K = self._network(pixels_BHWC)[0] / self._description.temperature
        index = int(logits_K.argmax()) if label is None else self.classes.index(label)
        map_HW = self._maps(pixels_BHWC, [index])[0].numpy()
        shown = fit_within(image, SIDE)
        jpeg = encode_jpeg(overlay(shown, within_letterbox(map_HW, image.size)), QUALITY, "4:4:4")
        return Explanation(self.classes[index], float(torch.softmax(logits_K.double(), 0)[index]), jpeg)


def within_letterbox(map_HW: npt.NDArray[np.float32], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return the part of a square map that belongs to an image of this width and height, without its white borders."""
    side = map_HW.shape[0]
    width, height = fitted_size(size, side)
    left, top = (side - width) // 2, (side - height) // 2
    return map_HW[top : top + height, left : left + width]


def overlay(image: Image.Image, map_HW: npt.NDArray[np.float32]) -> Image.Image:
    """Return an image under a heat map, from 0 to 1, which is scaled to its size."""
    heat = Image.fromarray(map_HW.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    return Image.fromarray(blend(np.asarray(image), np.asarray(heat)))


def blend(image_HWC: npt.NDArray[np.uint8], map_HW: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return uint8 pixels (H, W, 3) of an image under a heat map of the same size."""
    values = map_HW.clip(0, 1)
    stops: Sequence[float] = [value for value, _colour in COLOURS]
    colours = [np.interp(values, stops, [colour[channel] for _value, colour in COLOURS]) for channel in range(3)]
    share = OPACITY * values[..., None]
    blended: npt.NDArray[np.float64] = (1 - share) * image_HWC + share * np.stack(colours, axis=-1)
    return blended.round().astype(np.uint8)
