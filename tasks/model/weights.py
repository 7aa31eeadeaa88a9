"""The weights of a model package, read as data: tensors alone, as many and as large as its network has."""

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
from tasks.model.package import FILE_LIMITS, WEIGHTS_FILE, check_size

SPARE_BYTES = 16 << 20
"""What a file of weights may have beyond its tensors: their names and the archive's own."""

MAX_PICKLE_BYTES = 2 << 20
"""Of the names, shapes and places of the tensors: torchvision's largest classifiers have 200 KB."""

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
"""Of pickle: what `torch.save` writes of tensors. torch's own list has calls that allocate as much as they are told."""

GLOBALS = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch [A-Za-z0-9]+Storage")

WAY_OUT = "use a model that the flow promote registered"
OTHER_NETWORK = f"the model's {WEIGHTS_FILE} has the weights of another network than it says: {WAY_OUT}"


class WithoutMemory(TorchFunctionMode):
    """Builds the parameters of a network on the device `meta`, where they have names, shapes and types alone.

    `torch.device("meta")` would also take the numbers by which RegNet computes its widths.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, `torch.empty` for `meta`."""
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


def load_state(folder: Path, classifier: nn.Module) -> dict[str, Any]:
    """Return the weights of a model package, which are exactly those of `classifier`.

    Args:
        folder: The package.
        classifier: The network it names, which may be on the device `meta`: only names, shapes and types count.

    Raises:
        WrongInput: The file is larger or smaller than these weights are, is no state dict, or one of another network.
    """
    file = folder / WEIGHTS_FILE
    expected = classifier.state_dict()
    least = sum(value.numel() * value.element_size() for value in expected.values())
    most = least + SPARE_BYTES
    check_size(file, min(most, FILE_LIMITS[WEIGHTS_FILE]))
    unpacked = _check_archive(file, most)
    try:
        _check_pickles(file)
        # Tensors that share a place, or repeat one number, are as large as they say in memory alone.
        state = torch.load(file, map_location="cpu", weights_only=True) if unpacked >= least else None
    except Exception as error:  # Every wrong file fails in its own way: pickle, key, type and runtime errors.
        raise WrongInput(
            f"the model's {WEIGHTS_FILE} holds no weights alone ({type(error).__name__}), and is not read: {WAY_OUT}"
        ) from None
    if not isinstance(state, dict) or state.keys() != expected.keys():
        raise WrongInput(OTHER_NETWORK)
    if not all(_is_like(state[name], value) for name, value in expected.items()):
        raise WrongInput(OTHER_NETWORK)
    return state  # and no copy as a dict, which would lose the versions of its modules that MNASNet asks for


def _check_archive(file: Path, most: int) -> int:
    """Return the bytes of an archive's records; refuse what is not an archive, or has more of them.

    Raises:
        WrongInput: Says which.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except zipfile.BadZipFile:
        raise WrongInput(f"the model's {WEIGHTS_FILE} is no archive that torch.save wrote: {WAY_OUT}") from None
    size = sum(record.file_size for record in records)
    # torch stores its records as they are; compressed ones could be any size once they are read.
    if size > most or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise WrongInput(
            f"the model's {WEIGHTS_FILE} unpacks to {size} bytes, its network has {most} at most, uncompressed: "
            f"{WAY_OUT}"
        )
    return size


def _check_pickles(file: Path) -> None:
    """Refuse an archive whose pickle does more than name tensors.

    Raises:
        UnpicklingError: Says what it does.
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
