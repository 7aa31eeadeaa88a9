"""Names of networks and of their pretrained weights, without an import of torch until needed."""

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import WrongInput, similar_names
from tasks.model_package.description import file_sha256
from tasks.paths import expand_user

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

_REGISTERED = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
"""A function that torchvision registers as a model under its own name."""


def weights_digest(name: str, weights: str) -> str:
    """Return an identifier of the content of weights.

    For the path of a state dict it is the SHA-256 of the file. For DEFAULT it is the name of the file that torchvision
    downloads, which contains the beginning of its SHA-256 and may differ between versions of torchvision. Any other
    name is returned unchanged.

    Raises:
        WrongInput: `weights` is DEFAULT, and torchvision does not know the model.
    """
    if weights == "DEFAULT":
        return str(default_weights(name).url).rpartition("/")[2]
    path = expand_user(Path(weights))
    if weights == "none" or not path.is_file():
        return weights
    stat = path.stat()
    return _file_digest(path, stat.st_size, stat.st_mtime_ns)


@lru_cache
def _file_digest(path: Path, _size: int, _modified_ns: int) -> str:
    """Return the SHA-256 of a file, computed once per process unless its size or modification time changes."""
    return file_sha256(path)


def check_model_name(name: str) -> None:
    """Check that a model is a classifier of torchvision.

    Raises:
        WrongInput: It is not; the message tells how to list the classifiers.
    """
    if name not in (known := classifier_names()):
        listed = (
            "choose one of torchvision.models.list_models(module=torchvision.models), e.g. mobilenet_v2 or resnet18"
        )
        raise WrongInput(
            f"train.model is '{name}', which is not a torchvision classifier",
            setting="train.model",
            way_out=similar_names(name, known, listed),
        )


@lru_cache
def classifier_names() -> frozenset[str]:
    """Return the names of torchvision's classifiers, read from its sources: its import takes seconds."""
    found = find_spec("torchvision")
    assert found is not None, "torchvision is a dependency"
    assert found.origin is not None, "it is a package with files"
    sources = (Path(found.origin).parent / "models").glob("*.py")
    return frozenset(name for file in sources for name in _REGISTERED.findall(file.read_text(encoding="utf-8")))


def check_weights_file(weights: str) -> Path:
    """Return the path of a state dict.

    Raises:
        WrongInput: It is not a file.
    """
    path = expand_user(Path(weights))
    if not path.is_file():
        raise WrongInput(
            f"train.weights is '{weights}', which is not a file",
            setting="train.weights",
            way_out="give none, DEFAULT, or the path of a state dict",
        )
    return path


def default_weights(name: str) -> "WeightsEnum":
    """Return the default pretrained weights of an architecture in the installed torchvision.

    Raises:
        WrongInput: The model is not a classifier of torchvision.
    """
    import torchvision

    check_model_name(name)
    return torchvision.models.get_model_weights(name)["DEFAULT"]
