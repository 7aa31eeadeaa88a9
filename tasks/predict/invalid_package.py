"""Errors of a model package as errors for users; driver and Spark's Python workers import it."""

from collections.abc import Iterator
from contextlib import contextmanager

from tasks.errors import WrongInput
from tasks.model_package.description import InvalidPackage


@contextmanager
def translate_invalid() -> Iterator[None]:
    """Raise the error of an invalid model package as an error for users.

    Raises:
        WrongInput: The package is damaged, or was not written by this project.
    """
    try:
        yield
    except InvalidPackage as error:
        raise WrongInput(error) from None
