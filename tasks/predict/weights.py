"""The weights of a model package, read as data: tensors alone, as many and as large as its network has."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.errors import WrongInput
from tasks.predict.package import FILE_LIMITS, WEIGHTS_FILE, check_size

SPARE_BYTES = 16 << 20
"""What a file of weights may have beyond its tensors: their names and the archive's own."""


def load_state(folder: Path, classifier: nn.Module) -> dict[str, Any]:
    """Return the weights of a model package, which are exactly those of `classifier`.

    Raises:
        WrongInput: The file is larger than these weights can be, is no state dict, or one of another network.
    """
    file = folder / WEIGHTS_FILE
    expected = classifier.state_dict()
    most = sum(value.numel() * value.element_size() for value in expected.values()) + SPARE_BYTES
    check_size(file, min(most, FILE_LIMITS[WEIGHTS_FILE]))
    way_out = "use a model that the flow promote registered"
    try:
        with zipfile.ZipFile(file) as archive:
            # torch stores its records as they are; compressed ones could be any size once they are read.
            sizes = [record.file_size for record in archive.infolist()]
            packed = any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())
    except zipfile.BadZipFile:
        raise WrongInput(f"the model's {WEIGHTS_FILE} is no archive that torch.save wrote: {way_out}") from None
    if packed or sum(sizes) > most:
        raise WrongInput(
            f"the model's {WEIGHTS_FILE} unpacks to {sum(sizes)} bytes, its network has {most} at most, uncompressed: "
            f"{way_out}"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # Every wrong file fails in its own way: pickle, key, type and runtime errors.
        raise WrongInput(
            f"the model's {WEIGHTS_FILE} holds no weights alone ({type(error).__name__}), and is not read: {way_out}"
        ) from None
    fits = (
        isinstance(state, dict)
        and state.keys() == expected.keys()
        and all(
            isinstance(value, torch.Tensor) and value.shape == expected[name].shape for name, value in state.items()
        )
    )
    if not fits:
        raise WrongInput(f"the model's {WEIGHTS_FILE} has the weights of another network than it says: {way_out}")
    return dict(state)
