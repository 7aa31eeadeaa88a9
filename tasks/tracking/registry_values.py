"""Parsing of untrusted values from MLflow; invalid ones are ignored with a warning."""

import logging
import math
import re
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from tasks.config.values import RunId
from tasks.errors import WrongInput, loggable

logger = logging.getLogger("lakevision.tracking")

_RUN_ID: TypeAdapter[str] = TypeAdapter(RunId)


def whole_number(values: Mapping[str, str], name: str, of: str) -> int | None:
    """Return the whole number, of at most 15 digits, that `values` has under this name, or None.

    Args:
        values: Tags or parameters.
        name: Name of a tag or parameter.
        of: Name of the run or version that they belong to, for the warning.
    """
    text = values.get(name)
    if text is None:
        return None
    if re.fullmatch("[0-9]{1,15}", text) is None:
        _warn(name, text, of, "a whole number")
        return None
    return int(text)


def share(values: Mapping[str, str | float], name: str, of: str) -> float | None:
    """Return the number from 0 to 1 that `values` has under this name, or None; arguments as for `whole_number`."""
    value = values.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:  # also true for NaN
        _warn(name, str(value), of, "a number from 0 to 1")
        return None
    return number


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


def _warn(name: str, value: str, of: str, wanted: str) -> None:
    logger.warning("%s of %s is '%s' in MLflow, which is not %s: it is ignored", name, of, loggable(value), wanted)
