"""Names of networks, and their pretrained weights with their preprocessing; torch is not imported until needed."""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import WrongInput, similar_names
from tasks.model_package.description import (
    DESCRIPTION_FILE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    TIMM,
    WEIGHTS_FILE,
    Channels,
    Description,
    InvalidPackage,
    file_sha256,
    read_description,
)
from tasks.paths import expand_user

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

logger = logging.getLogger("lakevision.train")

_REGISTERED = re.compile(r"^@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
"""A function that torchvision or timm registers as a model under its own name."""

CHAMPION = "champion"

_RUN_ID = re.compile(r"[0-9a-f]{32}")
"""The id that MLflow gives to a run."""

RENORMALIZED = frozenset({"efficientnet_v2_l"})
"""Networks of torchvision whose weights older releases gave images with ImageNet's mean and standard deviation."""


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing that weights were trained with, by their own metadata.

    Attributes:
        mean: Mean of the channels (0-1).
        std: Their standard deviation.
        image_size: Side of the images, in pixels; None for random weights.
        about: How an image becomes one of this size, for messages.
    """

    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD
    image_size: int | None = None
    about: str = ""

    def difference(self, side: int) -> str:
        """Return a clause on images of another size than that of the weights, or an empty string."""
        if self.image_size in {None, side}:
            return ""
        return f"the weights are made for images of {self.image_size} pixels ({self.about})"


def preprocessing(name: str, weights: str) -> Preprocessing:
    """Return the preprocessing of weights; a state dict has that of the pretrained weights of its architecture.

    Raises:
        WrongInput: The model is unknown, or `weights` is the file of an invalid model package.
    """
    if weights == "none":
        return Preprocessing()
    if (package := package_of(weights)) is not None:
        return Preprocessing(package.mean, package.std, package.image_size, "the whole image on white")
    if name.startswith(TIMM):
        config = timm_config(name)
        about = f"{config.crop_mode} crop of {config.crop_pct:.3g}, {config.interpolation}"
        return Preprocessing(tuple(config.mean), tuple(config.std), max(config.input_size[1:]), about)
    given = default_weights(name).transforms()
    [side], [resized] = given.crop_size, given.resize_size
    about = f"center crop of {side / resized:.3g}, {given.interpolation.value}"
    return Preprocessing(tuple(given.mean), tuple(given.std), side, about)


def package_of(weights: str) -> Description | None:
    """Return the description beside the weights of a model package; None for other weights.

    Raises:
        WrongInput: The package is damaged, or was not written by this project.
    """
    file = expand_user(Path(weights))
    if file.name != WEIGHTS_FILE or not (file.parent / DESCRIPTION_FILE).is_file():
        return None
    try:
        description = read_description(file.parent)
    except InvalidPackage as error:
        cause = f"train.weights is '{weights}': {error}"
        raise WrongInput.complete(cause, setting="train.weights", way_out=error.way_out) from None
    if file.is_file() and weights_digest("", weights) != description.weights_sha256:
        raise WrongInput(
            f"train.weights is '{weights}', whose sha256 is not that in the {DESCRIPTION_FILE} beside it",
            setting="train.weights",
            way_out="restore both files, or give the file another name to load it as a state dict",
        )
    return description


def names_model(weights: str) -> bool:
    """Return whether weights are the champion's or those of an MLflow run, of which a flow fetches the file."""
    return weights == CHAMPION or _RUN_ID.fullmatch(weights) is not None


def weights_identity(name: str, weights: str) -> dict[str, str]:
    """Return what identifies weights, and how images are normalized for them, in the key of a training run."""
    identity = {"weights": weights_digest(name, weights)}
    if name in RENORMALIZED and weights != "none":
        identity["normalization"] = "of the weights"
    description = expand_user(Path(weights)).with_name(DESCRIPTION_FILE)
    if Path(weights).name == WEIGHTS_FILE and description.is_file():
        identity["description"] = file_sha256(description)  # Its classes have rows of the head.
    return identity


def weights_digest(name: str, weights: str) -> str:
    """Return an identifier of the content of weights.

    For the path of a state dict it is the SHA-256 of the file. For DEFAULT it is the name of the file that torchvision
    downloads, which contains the beginning of its SHA-256 and may differ between versions of torchvision. For a network
    of timm it is the name with its tag. Any other name is returned unchanged.

    Raises:
        WrongInput: `weights` is DEFAULT, and torchvision does not know the model.
    """
    if weights == "DEFAULT" and name.startswith(TIMM):
        config = timm_config(name)
        return f"{TIMM}{config.architecture}.{config.tag}"
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
    """Check that a model is a classifier of torchvision or timm; the tag of a name in timm is not checked.

    Raises:
        WrongInput: It is not; the message tells how to list the classifiers.
    """
    if name.startswith(TIMM):
        library, listed = "timm", "choose one of timm.list_models(), e.g. timm:resnet10t"
        known = frozenset(f"{TIMM}{known}" for known in classifier_names("timm"))
    else:
        library, known = "torchvision", classifier_names()
        listed = (
            "choose one of torchvision.models.list_models(module=torchvision.models), e.g. mobilenet_v2 or resnet18, "
            "or timm:NAME"
        )
    if (name.partition(".")[0] if library == "timm" else name) not in known:
        raise WrongInput(
            f"train.model is '{name}', which is not a {library} classifier",
            setting="train.model",
            way_out=similar_names(name, known, listed),
        )


@lru_cache
def classifier_names(library: str = "torchvision") -> frozenset[str]:
    """Return the names of the classifiers of torchvision or timm, read from its sources: its import takes seconds."""
    found = find_spec(library)
    assert found is not None, "both are dependencies"
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
            way_out=f"give none, DEFAULT, {CHAMPION}, the id of an MLflow run, or the path of a state dict",
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


def timm_config(name: str) -> Any:
    """Return timm's configuration of the pretrained weights of a network, timm.models.PretrainedCfg.

    Raises:
        WrongInput: timm has no such network, or no weights with the tag in the name.
    """
    import timm

    check_model_name(name)
    try:
        return timm.get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=False)
    except RuntimeError as error:
        raise WrongInput(
            f"train.model is '{name}', which timm does not know ({error})",
            setting="train.model",
            way_out="leave out what follows the dot, or give a name of timm.list_pretrained()",
        ) from None


def load_weights(name: str, weights: str) -> dict[str, Any] | None:
    """Return the state dict that `weights` names, or None for 'none'.

    In the checkpoint of another program it is an entry, such as `state_dict` or `model`.

    Raises:
        WrongInput: The file is missing or has not exactly one state dict, or the download failed.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if weights == "none":
        return None
    if weights == "DEFAULT":
        return _load_timm(name) if name.startswith(TIMM) else _load_default(name)
    path = check_weights_file(weights)
    try:
        # weights_only: a state dict is data, and an untrusted file must not run code.
        state = load_file(path) if _is_safetensors(path) else torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise WrongInput(
            f"train.weights is '{weights}', which is not a whole file of safetensors ({error})",
            setting="train.weights",
            way_out="copy it again",
        ) from None
    except Exception as error:  # Invalid files raise zip, pickle, key and type errors.
        raise WrongInput(
            f"train.weights is '{weights}', which is not a state dict ({type(error).__name__})",
            setting="train.weights",
            way_out="save one with torch.save(model.state_dict(), path)",
        ) from error
    if _is_state_dict(state):
        return dict(state)
    entries = {key: value for key, value in state.items() if _is_state_dict(value)} if isinstance(state, dict) else {}
    if len(entries) != 1:
        several = f"a file with {len(entries)} state dicts ({', '.join(map(str, entries))})"
        raise WrongInput(
            f"train.weights is '{weights}', which is {several if entries else 'not a state dict of tensors'}",
            setting="train.weights",
            way_out="save one of them with torch.save" if entries else "save model.state_dict()",
        )
    [(entry, found)] = entries.items()
    logger.info("train.weights '%s': its entry '%s' is used", weights, entry)
    return dict(found)


def _is_safetensors(path: Path) -> bool:
    """Return whether a file begins as safetensors do: 8 bytes with the length of a JSON object, then the object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _is_state_dict(value: object) -> bool:
    import torch

    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items())


def _load_default(name: str) -> dict[str, Any]:
    import torch

    file = Path(torch.hub.get_dir()) / "checkpoints" / weights_digest(name, "DEFAULT")
    existed = file.exists()
    try:
        # The digest is checked after a download, not for an existing file; both are loaded as data only.
        state: dict[str, Any] = default_weights(name).get_state_dict(check_hash=True, weights_only=True)
        return state
    except Exception as error:  # The digest differs, the network is down, or the file is invalid.
        if existed:
            raise WrongInput(
                f"train.weights is DEFAULT, and the file '{file}' is not a state dict ({type(error).__name__})",
                setting="train.weights",
                way_out="remove it to download it again",
            ) from None
        if not isinstance(error, OSError | RuntimeError):
            raise
        raise _not_downloaded(name, error) from None


def _load_timm(name: str) -> dict[str, Any]:
    import timm

    if not timm_config(name).has_weights:
        raise WrongInput(
            f"train.weights is DEFAULT, and timm has no pretrained weights of '{name}'",
            setting="train.weights",
            way_out="give another train.model, the path of a state dict, or none with train.freeze_backbone false",
        )
    try:
        # timm loads safetensors, or with weights_only; its filters convert the names of other projects' files.
        state: dict[str, Any] = timm.create_model(name.removeprefix(TIMM), pretrained=True).state_dict()
        return state
    except Exception as error:  # The client of the hub raises errors of several libraries.
        raise _not_downloaded(name, error) from None


def _not_downloaded(name: str, error: Exception) -> WrongInput:
    return WrongInput(
        f"train.weights is DEFAULT and the weights of {name} could not be downloaded ({error})",
        setting="train.weights",
        way_out="set train.weights to the path of a state dict, or to none with train.freeze_backbone false",
    )
