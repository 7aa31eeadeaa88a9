"""Searches that MLflow answers in pages."""

from mlflow.store.entities import PagedList

from tasks.tracking.server import all_results


def test_all_pages_are_read_in_order() -> None:
    """Each page is asked for once, by the token of the page before; the last one has an empty token."""
    pages = {None: PagedList([1, 2], "b"), "b": PagedList([], "c"), "c": PagedList([3], "")}
    asked: list[str | None] = []

    def search(token: str | None) -> PagedList[int]:
        asked.append(token)
        return pages[token]

    assert list(all_results(search)) == [1, 2, 3]
    assert asked == [None, "b", "c"]
