"""The two files of a model package, their bounds, and the description, which is checked before anything is built."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from tasks.errors import WrongInput, explain

WEIGHTS_FILE = "weights.pt"
DESCRIPTION_FILE = "model.json"

FILE_LIMITS = {DESCRIPTION_FILE: 16 << 20, WEIGHTS_FILE: 4 << 30}
"""Most bytes of each file, before anything of it is read: torchvision's largest classifier has 2.6 GB of weights."""


Label = Annotated[str, Field(min_length=1, max_length=1024)]
"""Longer than the name of any folder."""


class Description(BaseModel):
    """What a model package says of its weights: the architecture, its classes and its input."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: str = Field(max_length=100)
    # The first error is enough: a file of nothing else would have millions.
    classes: Annotated[tuple[Label, ...], FailFast()] = Field(min_length=2, max_length=1_000_000)
    image_size: int = Field(ge=16, le=1024)

    @field_validator("model")
    @classmethod
    def _is_known(cls, name: str) -> str:
        import torchvision  # Seconds to import, which a run with nothing to predict does without.

        if name not in torchvision.models.list_models(module=torchvision.models):
            raise ValueError(f"'{name}' is no classifier of the installed torchvision")
        return name

    @field_validator("classes")
    @classmethod
    def _are_unique(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(classes)) != len(classes):
            raise ValueError(f"{len(classes) - len(set(classes))} of {len(classes)} classes are there twice")
        return classes

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Return the description that the bytes of a file hold."""
        return cls.model_validate_json(content)


def read_description(folder: Path) -> Description:
    """Return the checked description of a model package.

    Raises:
        WrongInput: The file is too large or says what cannot be.
    """
    file = folder / DESCRIPTION_FILE
    check_size(file, FILE_LIMITS[DESCRIPTION_FILE])
    try:
        return Description.parse(file.read_bytes())
    except ValidationError as error:
        # Its values are bounded: a class of the registry's choice may be as long as the file.
        raise WrongInput(
            f"the model's {DESCRIPTION_FILE} is none that this project wrote ({explain(error)[:400]}): "
            "use a model that the flow promote registered"
        ) from None


def check_size(file: Path, most: int) -> None:
    """Refuse a file of a model package that is too large.

    Raises:
        WrongInput: Names the file, its size and the bound.
    """
    size = file.stat().st_size
    if size > most:
        raise WrongInput(
            f"the model's {file.name} has {size} bytes, and {most} is the most it can have: "
            "use a model that the flow promote registered"
        )
