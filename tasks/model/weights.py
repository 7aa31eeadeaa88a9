"""Safe loading of the weights of a model package: tensors only, with the names, shapes and types of its network."""

import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tasks.errors import WrongInput
from tasks.model.package import DESCRIPTION_FILE, FILE_LIMITS, WEIGHTS_FILE, check_size

SPARE_BYTES = 16 << 20
"""Allowance for a file of weights beyond the size of its tensors: their names and the structure of the archive."""

MAX_PICKLE_BYTES = 2 << 20
"""Size limit of the names, shapes and offsets of the tensors: torchvision's largest classifiers have 200 KB."""

OPCODES = frozenset(
    [
        "PROTO",
        "STOP",
        "MARK",
        "EMPTY_DICT",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "BINUNICODE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "NEWFALSE",
        "NEWTRUE",
        "BINPUT",
        "LONG_BINPUT",
        "BINGET",
        "LONG_BINGET",
        "GLOBAL",
        "REDUCE",
        "BUILD",
        "SETITEM",
        "SETITEMS",
        "BINPERSID",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
    ]
)
"""Pickle opcodes that `torch.save` writes for tensors. torch's own list includes calls that allocate any given size."""

GLOBALS = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch [A-Za-z0-9]+Storage")

WAY_OUT = "use a model that the flow promote registered"
OTHER_NETWORK = f"the model's {WEIGHTS_FILE} does not match the network in its {DESCRIPTION_FILE}: {WAY_OUT}"


class WithoutMemory(TorchFunctionMode):
    """Function mode in which a network's parameters are built on the meta device, with shapes and types but no data.

    `torch.device("meta")` would also affect the tensors from which RegNet computes its widths.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with the meta device for `torch.empty`."""
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


def load_state(folder: Path, classifier: nn.Module) -> dict[str, Any]:
    """Return the weights of a model package, with exactly the names, shapes and types of those of `classifier`.

    Args:
        folder: Folder of the model package.
        classifier: The network that the package names; it may be on the meta device.

    Raises:
        WrongInput: The size of the file is wrong, it is not a state dict, or it is the state dict of another network.
    """
    file = folder / WEIGHTS_FILE
    expected = classifier.state_dict()
    min_bytes = sum(value.numel() * value.element_size() for value in expected.values())
    max_bytes = min_bytes + SPARE_BYTES
    check_size(file, min(max_bytes, FILE_LIMITS[WEIGHTS_FILE]))
    unpacked = _check_archive(file, max_bytes)
    try:
        _check_pickles(file)
        # Tensors that share storage or repeat one value are small in the file and large in memory.
        state = torch.load(file, map_location="cpu", weights_only=True) if unpacked >= min_bytes else None
    except Exception as error:  # Invalid files raise pickle, key, type and runtime errors.
        raise WrongInput(
            f"the model's {WEIGHTS_FILE} is not a plain state dict ({type(error).__name__}) "
            f"and was not loaded: {WAY_OUT}"
        ) from None
    if not isinstance(state, dict) or state.keys() != expected.keys():
        raise WrongInput(OTHER_NETWORK)
    if not all(_is_like(state[name], value) for name, value in expected.items()):
        raise WrongInput(OTHER_NETWORK)
    return state  # Not copied to a dict, which would lose the module versions that MNASNet needs.


def _check_archive(file: Path, max_bytes: int) -> int:
    """Return the size of an archive's records in bytes.

    Raises:
        WrongInput: The file is not a zip archive, has compressed records, or its records exceed `max_bytes`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except zipfile.BadZipFile:
        raise WrongInput(f"the model's {WEIGHTS_FILE} is not an archive written by torch.save: {WAY_OUT}") from None
    size = sum(record.file_size for record in records)
    # torch.save stores records uncompressed; compressed ones could unpack to any size.
    if size > max_bytes or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise WrongInput(
            f"the model's {WEIGHTS_FILE} unpacks to {size} bytes, and its network has at most {max_bytes}, "
            f"uncompressed: {WAY_OUT}"
        )
    return size


def _check_pickles(file: Path) -> None:
    """Check that the pickles of an archive do nothing but describe tensors.

    Raises:
        UnpicklingError: A pickle is too large, or has another opcode; the message names it.
    """
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if not record.filename.endswith(".pkl"):
                continue
            if record.file_size > MAX_PICKLE_BYTES:
                raise pickle.UnpicklingError(f"{record.file_size} bytes")
            for opcode, argument, _place in pickletools.genops(archive.read(record)):
                if opcode.name not in OPCODES or (opcode.name == "GLOBAL" and not GLOBALS.fullmatch(str(argument))):
                    raise pickle.UnpicklingError(opcode.name)


def _is_like(value: object, expected: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and (value.dtype, value.shape) == (expected.dtype, expected.shape)
    )
