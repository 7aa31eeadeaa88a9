"""The classifier of encoded images in a model package, shared by batch inference, streaming and serving.

Its weights are safetensors: tensors with the names, shapes and types of a network, read as data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .decode import decode_pixels
from .description import (
    DESCRIPTION_FILE,
    FILE_LIMITS,
    FORMAT,
    IMAGENET_MEAN,
    IMAGENET_STD,
    NEWEST,
    TOP_K,
    UNKNOWN,
    UNSURE,
    WAY_OUT,
    WEIGHTS_FILE,
    Channels,
    Decoding,
    Description,
    InvalidPackage,
    Precision,
    check_size,
    check_unknown,
    check_unsure,
    file_sha256,
    read_description,
    threshold_at,
)
from .network import ImageNetwork, WithoutMemory, build_network
from .reasons import BadImage
from .serving import available_precision, is_out_of_memory, serving_network, unknown_scores


@dataclass(frozen=True)
class Prediction:
    """Prediction of one image: its label, or the error."""

    label: str | None = None
    """The most probable class, UNKNOWN, UNSURE, or None for an error."""
    index: int | None = None
    """Number of the class of `label`; None for UNKNOWN, UNSURE and an error."""
    probability: float | None = None
    """Probability of the most probable class (0-1), calibrated; None for an error."""
    top_labels: tuple[str, ...] = ()
    """The most probable classes in descending order; empty for an error."""
    top_probabilities: tuple[float, ...] = ()
    """Their probabilities (0-1)."""
    error: str | None = None
    """Reason and detail of an image that cannot be decoded, or None."""
    unknown_score: float | None = None
    """Score (0-1), higher for images of no class; None for an error, and for a model without thresholds."""


class ImageClassifier:
    """A trained classifier of encoded images."""

    def __init__(self, network: ImageNetwork, description: Description, device: torch.device) -> None:
        """Prepare a network for inference.

        Args:
            network: The trained network.
            description: Its description; the precision is another one where the device does not compute in it.
            device: Device of the computations.
        """
        self.classes = description.classes
        self.image_size = description.image_size
        self.decoding = description.decoding
        self.temperature = description.temperature
        self.unknown_thresholds = description.unknown_thresholds
        self.precision = available_precision(description.precision, device)
        self._network = serving_network(network.to(device), self.precision, self.temperature)
        self._device = device

    def predict(
        self,
        contents: Sequence[bytes],
        top_k: int = TOP_K,
        min_probability: float = 0.0,
        unknown_rate: float = 0.0,
    ) -> list[Prediction]:
        """Decode and predict each image; an image that cannot be decoded gets an error and affects no other.

        Args:
            contents: Contents of image files.
            top_k: Number of classes in a prediction, at least 1; all if the model has fewer.
            min_probability: Probability (0-1) of the most probable class below which the label is UNSURE.
            unknown_rate: Fraction of images of the classes that may get the label UNKNOWN, which goes before UNSURE.

        Raises:
            ValueError: `top_k` or `min_probability` is out of range, UNSURE is the name of a class, or as
                `check_unknown`.
        """
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}: give at least 1")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability is {min_probability}: give a number from 0 to 1")
        check_unsure(min_probability, self.classes)
        check_unknown(unknown_rate, self.classes, self.unknown_thresholds)
        threshold = threshold_at(unknown_rate, self.unknown_thresholds)
        predictions: list[Prediction | None] = [None] * len(contents)
        images = []
        places = []
        for place, content in enumerate(contents):
            try:
                images.append(decode_pixels(content, self.image_size, self.decoding))
                places.append(place)
            except BadImage as bad:
                predictions[place] = Prediction(error=str(bad))
        if images:
            logits_BK = self.logits(torch.from_numpy(np.stack(images))).cpu()
            # By logits: probabilities may round to the same number. Stable: of equal ones the first wins, as in argmax.
            order_Bk = logits_BK.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            probabilities_Bk = torch.softmax(logits_BK.double(), dim=1).gather(1, order_Bk)
            scores_B = unknown_scores(logits_BK * self.temperature)
            for place, indices, probabilities, score in zip(
                places, order_Bk.tolist(), probabilities_Bk.tolist(), scores_B.tolist(), strict=True
            ):
                labels = tuple(self.classes[index] for index in indices)
                other = UNKNOWN if score > threshold else UNSURE if probabilities[0] < min_probability else None
                predictions[place] = Prediction(
                    label=other or labels[0],
                    index=None if other else indices[0],
                    probability=probabilities[0],
                    top_labels=labels,
                    top_probabilities=tuple(probabilities),
                    unknown_score=None if self.unknown_thresholds is None else score,
                )
        return [prediction for prediction in predictions if prediction is not None]

    def logits(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        """Return calibrated logits, float32 (B, K), of uint8 images (B, H, W, 3) on any device.

        If the memory of a GPU is not enough, they are computed in two halves.
        """
        try:
            with torch.inference_mode():
                logits_BK: torch.Tensor = self._network(images_BHWC.to(self._device))
                return logits_BK
        except RuntimeError as error:
            if len(images_BHWC) == 1 or not is_out_of_memory(error):
                raise
        # Outside the handler, whose traceback would hold the tensors of the failed pass.
        torch.cuda.empty_cache()
        return torch.cat([self.logits(half) for half in images_BHWC.chunk(2)])

    @classmethod
    def load(cls, folder: Path, device: torch.device | None = None) -> Self:
        """Load a classifier written by `save_classifier`, without running code from its files.

        Args:
            folder: Folder of the model package.
            device: Device of the computations; None for a GPU if there is one.

        Raises:
            InvalidPackage: The files are not a valid model package, or the weights are not the described ones.
        """
        network, description = load_network(folder)
        return cls(network, description, device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def save_classifier(
    folder: Path,
    model: str,
    state: Mapping[str, torch.Tensor],
    classes: Sequence[str],
    image_size: int,
    *,
    mean: Channels = IMAGENET_MEAN,
    std: Channels = IMAGENET_STD,
    precision: Precision = "float32",
    temperature: float = 1.0,
    decoding: Decoding = NEWEST,
    unknown_thresholds: tuple[float, ...] | None = None,
) -> None:
    """Write the weights and the description of a classifier to `folder`.

    Args:
        folder: Destination; created if it is missing.
        model: Name of the network in torchvision, or TIMM and its name in timm.
        state: State dict of the network, in which no two tensors share memory.
        classes: Names of its classes.
        image_size: Side of the square into which images are scaled, in pixels.
        mean: Mean of the channels (0-1) that the images are normalized with.
        std: Their standard deviation.
        precision: Precision in which the network was tested.
        temperature: Divisor of the logits.
        decoding: Decoding of the images that the network was trained on.
        unknown_thresholds: Thresholds of RATES; None for none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(state, folder / WEIGHTS_FILE)
    description = Description(
        format=FORMAT,
        model=model,
        classes=tuple(classes),
        image_size=image_size,
        mean=mean,
        std=std,
        precision=precision,
        temperature=temperature,
        weights_sha256=file_sha256(folder / WEIGHTS_FILE),
        decoding=decoding,
        unknown_thresholds=unknown_thresholds,
    )
    (folder / DESCRIPTION_FILE).write_text(description.model_dump_json(indent=2))


def load_network(folder: Path) -> tuple[ImageNetwork, Description]:
    """Load the trained network of a model package, in float32 on the CPU, and its description.

    Args:
        folder: Folder of the model package.

    Raises:
        InvalidPackage: As `ImageClassifier.load`.
    """
    description = read_description(folder)
    build = partial(
        build_network,
        *(description.model, len(description.classes), description.image_size, description.mean, description.std),
    )
    try:
        with WithoutMemory():  # A description of a kilobyte may name the largest network with a million classes.
            network = build()
    except Exception as error:  # Each architecture raises its own, for a size or without a head.
        raise InvalidPackage(
            f"the network in the model's {DESCRIPTION_FILE} cannot be built ({error}): {WAY_OUT}"
        ) from None
    check_weights(folder, network.state_dict())
    if (found := file_sha256(folder / WEIGHTS_FILE)) != description.weights_sha256:
        raise InvalidPackage(
            f"the model's {WEIGHTS_FILE} has the sha256 {found}, and its {DESCRIPTION_FILE} names "
            f"{description.weights_sha256}, so it is damaged or of another model: {WAY_OUT}"
        )
    return load_weights(folder, network, build), description


SPARE_BYTES = 16 << 20
"""Allowance for a file of weights beyond the size of its tensors: their names, shapes and offsets."""

TYPES = {torch.float32: "F32", torch.int64: "I64"}
"""Names in safetensors of the data types in the state dicts of torchvision's classifiers."""


def save_weights(state: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a state dict, in which no two tensors share memory."""
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, file)


def check_weights(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the weights of a model package have exactly the names, shapes and types of a state dict.

    Args:
        folder: Folder of the model package.
        expected: The state dict, which may be on the meta device.

    Raises:
        InvalidPackage: The file is too large, is not a file of safetensors, or has the weights of another network.
    """
    file = folder / WEIGHTS_FILE
    size = sum(value.numel() * value.element_size() for value in expected.values())
    check_size(file, min(size + SPARE_BYTES, FILE_LIMITS[WEIGHTS_FILE]))
    try:
        with safe_open(file, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118  # it is not a mapping
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise InvalidPackage(
            f"the model's {WEIGHTS_FILE} is not a file of safetensors ({str(error)[:200]}): {WAY_OUT}"
        ) from None
    if found != {name: (tuple(value.shape), TYPES.get(value.dtype)) for name, value in expected.items()}:
        raise InvalidPackage(f"the model's {WEIGHTS_FILE} does not match the network in its description: {WAY_OUT}")


def load_weights(folder: Path, network: ImageNetwork, build: Callable[[], ImageNetwork]) -> ImageNetwork:
    """Return a network with the weights of a model package, which `check_weights` has checked.

    Args:
        folder: Folder of the model package.
        network: The network on the meta device, which gets the weights if they are all of its tensors.
        build: Builds the network with random weights, which takes longer.
    """
    # Tensors that are not in the state dict have no values on the meta device.
    persistent = network.state_dict(keep_vars=True)
    kept = {id(value) for value in persistent.values()}
    whole = all(id(value) in kept for value in (*network.parameters(), *network.buffers()))
    target = network if whole else build()
    state = target.state_dict()
    for name, value in load_file(folder / WEIGHTS_FILE).items():
        # Into the network's own state dict: MNASNet needs the module versions in it.
        # A copy: safetensors maps the file into memory, where the network would change with the file.
        state[name] = value.clone() if whole else value
    target.load_state_dict(state, assign=whole)
    return target
