"""The files of a model package, their size limits, and the description, validated before a network is built."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

Precision = Literal["float32", "bfloat16"]
"""Number format of the computations of a network; weights and logits are float32."""

Channels = tuple[float, float, float]
"""A value of each channel, RGB."""

IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels (0-1), with which most weights were trained."""

TIMM = "timm:"
"""Beginning of the names of timm's networks; all others are torchvision's."""

WEIGHTS_FILE = "weights.safetensors"
DESCRIPTION_FILE = "model.json"

FILE_LIMITS = {DESCRIPTION_FILE: 16 << 20, WEIGHTS_FILE: 4 << 30}
"""Size limit of each file in bytes, checked before reading: torchvision's largest classifier has 2.6 GB of weights."""

WAY_OUT = "use a model that the flow promote registered"

MAX_SHOWN = 100
"""Maximum length of an invalid value in a message: a class name in an untrusted file may be as long as the file."""

FORMAT: Literal[2] = 2
"""Version of the files. 1 (release 0.1.0): weights as a pickle, neither precision nor temperature."""

UNSURE = "unsure"
"""Label of an image whose most probable class is less probable than the given minimum."""

UNKNOWN = "unknown"
"""Label of an image whose score, `unknown_scores`, is above the threshold of the given false-alarm rate."""

RATES = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.3, 0.5)
"""False-alarm rates with a threshold in the model package: fractions of images of the classes that score above it."""

Thresholds = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=len(RATES), max_length=len(RATES))
]
"""The thresholds of RATES, fitted on the split `val`; that of 1 is exceeded by no score."""

TOP_K = 5
"""Number of classes in a prediction, unless another one is given."""

Label = Annotated[str, Field(min_length=1, max_length=1024)]
"""A class name; the limit is longer than any folder name."""


Deviation = Annotated[float, Field(gt=0)]
"""A standard deviation, by which pixels are divided."""


class Decoding(BaseModel):
    """Version and setting that decide the pixels of a file, besides its bytes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1, 2, 3] = 3
    """1: of samples of 16 bits the upper 8, whatever their range, without their transparent colour.

    2: scaled by their range, or refused, and the transparent colour lies on white. 3: also, colours by the profile of a
    file become sRGB.
    """
    sample_bits: int | None = Field(None, ge=8, le=31)
    """Bits that samples of more than 8 bits use; None: as the file says."""

    def __str__(self) -> str:
        """Return version and setting as text."""
        return f"version {self.version}" + ("" if self.sample_bits is None else f", samples of {self.sample_bits} bits")


AS_BEFORE = Decoding(version=1)
"""Decoding of tables, caches and models that do not record any."""

NEWEST = Decoding()
"""Decoding of new tables."""


class InvalidPackage(ValueError):
    """The files of a model package are damaged, or were not written by this project; the message is one sentence.

    Attributes:
        way_out: Advice how to continue, which ends the message.
    """

    way_out = WAY_OUT


def _check_unique(classes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(classes)) != len(classes):
        raise ValueError(f"{len(classes) - len(set(classes))} of {len(classes)} classes are duplicates")
    return classes


# Stop at the first error: an invalid file may have millions.
Classes = Annotated[
    tuple[Label, ...], FailFast(), Field(min_length=2, max_length=1_000_000), AfterValidator(_check_unique)
]


class DescribedClasses(BaseModel):
    """The classes in a description, thresholds of UNKNOWN, and digest; torch is not imported to validate them."""

    model_config = ConfigDict(frozen=True, strict=True)

    classes: Classes
    unknown_thresholds: Thresholds | None = None
    weights_sha256: str = ""


class Description(BaseModel):
    """Description of a model package."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    format: Literal[2]
    """Version of the files."""
    model: str = Field(max_length=100)
    """Name of the network in torchvision, or TIMM and its name in timm."""
    classes: Classes
    image_size: int = Field(ge=16, le=1024)
    """Side of the square into which images are scaled, in pixels."""
    mean: Channels = IMAGENET_MEAN
    std: tuple[Deviation, Deviation, Deviation] = IMAGENET_STD
    """Mean and standard deviation (0-1) that images are normalized with; models of earlier releases do not record
    them."""
    precision: Precision
    """Precision in which the model was tested, and in which it is served where the device computes in it."""
    temperature: float = Field(gt=0, le=1000, allow_inf_nan=False)
    """Divisor of the logits, fitted on the split `val`."""
    weights_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """sha256 of the file of weights."""
    decoding: Decoding = AS_BEFORE
    """Decoding of the images that the model was trained on; models of earlier releases do not record it."""
    unknown_thresholds: Thresholds | None = None
    """Thresholds of the score of UNKNOWN; models of earlier releases have none, and no score."""

    @field_validator("model")
    @classmethod
    def _is_known(cls, name: str) -> str:
        # Both take seconds to import, which a run with nothing to predict saves.
        if name.startswith(TIMM):
            import timm

            try:
                # Of registered names alone: others may stand for a folder, or for a repository of a hub.
                timm.get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=False)
            except RuntimeError:
                raise ValueError(f"'{name}' is not a classifier of the installed timm") from None
            return name
        import torchvision

        if name not in torchvision.models.list_models(module=torchvision.models):
            raise ValueError(f"'{name}' is not a classifier of the installed torchvision")
        return name


_Kind = TypeVar("_Kind", bound=BaseModel)


def check_unsure(min_probability: float, classes: Collection[str]) -> None:
    """Check that UNSURE is not a class, if images below a minimum probability get it as their label.

    Raises:
        ValueError: It is a class.
    """
    if min_probability and UNSURE in classes:
        raise ValueError(f"min_probability is {min_probability}, but '{UNSURE}' is a class of the model: give 0")


def threshold_at(unknown_rate: float, thresholds: Sequence[float] | None) -> float:
    """Return the threshold of a false-alarm rate, between two of RATES that of the lower one; 1 for the rate 0."""
    known = zip(RATES, thresholds or (), strict=bool(thresholds))
    return min((threshold for rate, threshold in known if rate <= unknown_rate), default=1.0)


def check_unknown(unknown_rate: float, classes: Collection[str], thresholds: Sequence[float] | None = ()) -> None:
    """Check the false-alarm rate from which on images get the label UNKNOWN.

    Args:
        unknown_rate: The rate; 0 for no such label.
        classes: Classes of the model.
        thresholds: Thresholds of the model, None if it has none; empty if they are not known yet.

    Raises:
        ValueError: The rate is neither 0 nor within RATES, UNKNOWN is a class, or the model has no thresholds.
    """
    if not unknown_rate:
        return
    if not RATES[0] <= unknown_rate <= RATES[-1]:
        raise ValueError(f"unknown_rate is {unknown_rate}: give 0, or a rate from {RATES[0]} to {RATES[-1]}")
    if UNKNOWN in classes:
        raise ValueError(f"unknown_rate is {unknown_rate}, but '{UNKNOWN}' is a class of the model: give 0")
    if thresholds is None:
        raise ValueError(
            f"unknown_rate is {unknown_rate}, but the model has no thresholds, as models of earlier releases: give 0, "
            "or train and promote again"
        )


def read_description(folder: Path) -> Description:
    """Return the validated description of a model package.

    Raises:
        InvalidPackage: The file is too large or invalid.
    """
    return _read(folder, Description)


def read_classes(folder: Path) -> DescribedClasses:
    """Return the classes of a model package, its thresholds and digest; the rest of it is not validated.

    Raises:
        InvalidPackage: As `read_description`.
    """
    return _read(folder, DescribedClasses)


def _read(folder: Path, kind: type[_Kind]) -> _Kind:
    file = folder / DESCRIPTION_FILE
    check_size(file, FILE_LIMITS[DESCRIPTION_FILE])
    try:
        return kind.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise InvalidPackage(
            f"the model's {DESCRIPTION_FILE} was not written by this version of the project ({_reason(error)}): "
            f"{WAY_OUT}"
        ) from None


def _reason(error: ValidationError) -> str:
    """Return the first error of a description: the field, its value, and what it must be."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"])) or "the file"
    value = "" if first["type"] in {"missing", "json_invalid"} else f" is {repr(first['input'])[:MAX_SHOWN]}"
    return f"{field}{value}: {first['msg'].removeprefix('Value error, ')[: 2 * MAX_SHOWN]}"


def check_size(file: Path, max_bytes: int) -> None:
    """Check the size of a file of a model package.

    Raises:
        InvalidPackage: The file is too large; the message gives its size and the limit.
    """
    size = file.stat().st_size
    if size > max_bytes:
        raise InvalidPackage(f"the model's {file.name} has {size} bytes, more than the limit of {max_bytes}: {WAY_OUT}")


def file_sha256(file: Path) -> str:
    """Return the sha256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
