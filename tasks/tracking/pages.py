"""Results of a search that MLflow answers in pages."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from mlflow.store.entities import PagedList

T = TypeVar("T")


def all_results(search: Callable[[str | None], PagedList[T]]) -> Iterator[T]:
    """Yield the results of all pages.

    Args:
        search: Returns the page of a token; None is the first one.
    """
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
