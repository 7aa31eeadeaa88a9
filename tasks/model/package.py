"""The files of a model package, their size limits, and the description, validated before a network is built."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from tasks.errors import WrongInput, explain

WEIGHTS_FILE = "weights.pt"
DESCRIPTION_FILE = "model.json"

FILE_LIMITS = {DESCRIPTION_FILE: 16 << 20, WEIGHTS_FILE: 4 << 30}
"""Size limit of each file in bytes, checked before reading: torchvision's largest classifier has 2.6 GB of weights."""


Label = Annotated[str, Field(min_length=1, max_length=1024)]
"""A class name; the limit is longer than any folder name."""


def _check_unique(classes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(classes)) != len(classes):
        raise ValueError(f"{len(classes) - len(set(classes))} of {len(classes)} classes are duplicates")
    return classes


# Stop at the first error: an invalid file may have millions.
Classes = Annotated[
    tuple[Label, ...], FailFast(), Field(min_length=2, max_length=1_000_000), AfterValidator(_check_unique)
]


class DescribedClasses(BaseModel):
    """The classes in a description; torch is not imported to validate them."""

    model_config = ConfigDict(frozen=True, strict=True)

    classes: Classes


class Description(BaseModel):
    """Description of the weights of a model package: architecture, classes and image size."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: str = Field(max_length=100)
    classes: Classes
    image_size: int = Field(ge=16, le=1024)

    @field_validator("model")
    @classmethod
    def _is_known(cls, name: str) -> str:
        import torchvision  # Takes seconds to import, which a run with nothing to predict saves.

        if name not in torchvision.models.list_models(module=torchvision.models):
            raise ValueError(f"'{name}' is not a classifier of the installed torchvision")
        return name


_Kind = TypeVar("_Kind", bound=BaseModel)


def read_description(folder: Path) -> Description:
    """Return the validated description of a model package.

    Raises:
        WrongInput: The file is too large or invalid.
    """
    return _read(folder, Description)


def read_classes(folder: Path) -> tuple[str, ...]:
    """Return the classes of a model package; the rest of its description is not validated.

    Raises:
        WrongInput: As `read_description`.
    """
    return _read(folder, DescribedClasses).classes


def _read(folder: Path, kind: type[_Kind]) -> _Kind:
    file = folder / DESCRIPTION_FILE
    check_size(file, FILE_LIMITS[DESCRIPTION_FILE])
    try:
        return kind.model_validate_json(file.read_bytes())
    except ValidationError as error:
        # Truncated: a class name in an untrusted file may be as long as the file.
        raise WrongInput(
            f"the model's {DESCRIPTION_FILE} was not written by this project ({explain(error)[:400]}): "
            "use a model that the flow promote registered"
        ) from None


def check_size(file: Path, max_bytes: int) -> None:
    """Check the size of a file of a model package.

    Raises:
        WrongInput: The file is too large; the message gives its size and the limit.
    """
    size = file.stat().st_size
    if size > max_bytes:
        raise WrongInput(
            f"the model's {file.name} has {size} bytes, more than the limit of {max_bytes}: "
            "use a model that the flow promote registered"
        )
