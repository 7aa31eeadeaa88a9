"""Names of networks and of their pretrained weights; imports no torch until one is looked up."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import WrongInput

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


def weights_digest(name: str, weights: str) -> str:
    """Return what tells weights from others, whatever they are called here or by torchvision.

    That is the sha256 of a state dict's file. Of DEFAULT it is the name of the file that torchvision downloads, in
    which the beginning of its sha256 is: with another torchvision it may be another. What names no file is returned
    as it is.

    Raises:
        WrongInput: DEFAULT of a model that torchvision does not know.
    """
    if weights == "DEFAULT":
        return str(default_weights(name).url).rpartition("/")[2]
    path = Path(weights).expanduser()
    if weights == "none" or not path.is_file():
        return weights
    facts = path.stat()
    return _file_digest(path, facts.st_size, facts.st_mtime_ns)


@lru_cache
def _file_digest(path: Path, _size: int, _modified_ns: int) -> str:
    """Digest a file once a process, and again when its size or time changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_model_name(name: str) -> None:
    """Refuse a model torchvision does not know as a classifier.

    Raises:
        WrongInput: Names the model and how to list the known ones.
    """
    import torchvision

    if name not in torchvision.models.list_models(module=torchvision.models):
        raise WrongInput(
            f"train.model is '{name}', which is no torchvision classifier: choose one of "
            "torchvision.models.list_models(module=torchvision.models), e.g. mobilenet_v2 or resnet18"
        )


def default_weights(name: str) -> "WeightsEnum":
    """Return torchvision's pretrained weights of an architecture, as this version of it has them.

    Raises:
        WrongInput: It knows no such classifier.
    """
    import torchvision

    check_model_name(name)
    return torchvision.models.get_model_weights(name)["DEFAULT"]
