"""Names of networks and of their pretrained weights, without an import of torch until needed."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import WrongInput
from tasks.model_package.description import file_sha256
from tasks.paths import expand_user

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


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
    import torchvision

    if name not in torchvision.models.list_models(module=torchvision.models):
        raise WrongInput(
            f"train.model is '{name}', which is not a torchvision classifier",
            setting="train.model",
            way_out="choose one of torchvision.models.list_models(module=torchvision.models), e.g. mobilenet_v2 or "
            "resnet18",
        )


def default_weights(name: str) -> "WeightsEnum":
    """Return the default pretrained weights of an architecture in the installed torchvision.

    Raises:
        WrongInput: The model is not a classifier of torchvision.
    """
    import torchvision

    check_model_name(name)
    return torchvision.models.get_model_weights(name)["DEFAULT"]
