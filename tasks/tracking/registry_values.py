"""Parsing of untrusted values from MLflow; invalid ones are ignored with a warning."""

import logging
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from tasks.config.values import RunId
from tasks.errors import WrongInput, loggable

logger = logging.getLogger("lakevision.tracking")

T = TypeVar("T")

_RUN_ID: TypeAdapter[str] = TypeAdapter(RunId)
_WHOLE_NUMBER: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(pattern=r"^[0-9]{1,15}$")])
_SHARE: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=1)])  # NaN is neither


def whole_number(values: Mapping[str, str], name: str, of: str) -> int | None:
    """Return the whole number, of at most 15 digits, that `values` has under this name, or None.

    Args:
        values: Tags or parameters.
        name: Name of a tag or parameter.
        of: Name of the run or version that they belong to, for the warning.
    """
    text = _valid(_WHOLE_NUMBER, values, name, of, "a whole number")
    return None if text is None else int(text)


def share(values: Mapping[str, str | float], name: str, of: str) -> float | None:
    """Return the number from 0 to 1 that `values` has under this name, or None; arguments as for `whole_number`."""
    return _valid(_SHARE, values, name, of, "a number from 0 to 1")


def checked_run_id(run_id: str | None, of: str) -> str:
    """Return the run id of a registered version if it is valid.

    Raises:
        WrongInput: It is missing, or is not a valid MLflow run id.
    """
    try:
        return _RUN_ID.validate_python(run_id)
    except ValidationError:
        raise WrongInput(
            f"{of} names the MLflow run {loggable(repr(run_id))}, which is not a valid run id, so it was not "
            "registered by this project's flow promote",
            way_out="set the alias to another version in MLflow, or remove it there",
        ) from None


def _valid(kind: TypeAdapter[T], values: Mapping[str, str | float], name: str, of: str, wanted: str) -> T | None:
    if (value := values.get(name)) is None:
        return None
    try:
        return kind.validate_python(value)
    except ValidationError:
        shown = loggable(str(value))
        logger.warning("%s of %s is '%s' in MLflow, which is not %s: it is ignored", name, of, shown, wanted)
        return None
