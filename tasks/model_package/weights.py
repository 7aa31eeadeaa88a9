"""Weights of a model package as safetensors: tensors with the names, shapes and types of a network, read as data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from .description import FILE_LIMITS, WAY_OUT, WEIGHTS_FILE, InvalidPackage, check_size

Network = TypeVar("Network", bound=nn.Module)

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


def load_weights(folder: Path, network: Network, build: Callable[[], Network]) -> Network:
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
