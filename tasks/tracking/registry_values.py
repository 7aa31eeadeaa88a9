"""Values that anybody with access to MLflow may have written: parsed, or treated as absent with a warning."""

import logging
import math
import re
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from tasks.config.values import RunId
from tasks.errors import WrongInput, shown

logger = logging.getLogger("lakevision.tracking")

_RUN_ID: TypeAdapter[str] = TypeAdapter(RunId)


def whole_number(values: Mapping[str, str], name: str, of: str) -> int | None:
    """Return the whole number from 0 to 2^53 that `values` has under this name, or None.

    Args:
        values: Tags or parameters.
        name: The name of one of them.
        of: What they belong to, for the warning.
    """
    text = values.get(name)
    if text is None:
        return None
    if re.fullmatch("[0-9]{1,15}", text) is None:
        _warn(name, text, of, "a whole number")
        return None
    return int(text)


def share(values: Mapping[str, str | float], name: str, of: str) -> float | None:
    """Return the number from 0 to 1 that `values` has under this name, or None; the arguments as `whole_number`."""
    value = values.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:  # NaN is not
        _warn(name, str(value), of, "a number from 0 to 1")
        return None
    return number


def checked_run_id(run_id: str | None, of: str) -> str:
    """Return the id of the run that a registered version names.

    Raises:
        WrongInput: It is not an id of MLflow's, or is missing.
    """
    try:
        return _RUN_ID.validate_python(run_id)
    except ValidationError:
        raise WrongInput(
            f"{of} names the MLflow run {shown(repr(run_id))}, which is not the id of one, so it was not registered by "
            "this project's flow promote: let the alias name another version in MLflow, or remove it there"
        ) from None


def _warn(name: str, value: str, of: str, wanted: str) -> None:
    logger.warning("%s of %s is '%s' in MLflow, which is not %s: it is not used", name, of, shown(value), wanted)
