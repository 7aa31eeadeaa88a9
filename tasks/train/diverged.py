"""The error of a training whose numbers are none any more."""

from collections.abc import Callable

from tasks.errors import WrongInput


class Diverged(WrongInput):
    """A loss, gradient or metric is no number any more: with the same settings it would be so again.

    Attributes:
        rows: Rows of the split `train` that the step was on; empty where it was of no one step.
    """

    def __init__(self, message: str, rows: list[int] | None = None) -> None:
        super().__init__(message)
        self.rows = rows or []

    def naming(self, name: Callable[[list[int]], str]) -> "Diverged":
        """Return the same, with the pictures of the step named where it was of one."""
        return Diverged(f"{self}; its pictures: {name(self.rows)}") if self.rows else self
