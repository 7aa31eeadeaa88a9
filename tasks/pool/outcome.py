"""What a run on a work pool ended with, as whoever waits for it is told."""

import re

from tasks.distributed.rank import TOLD
from tasks.errors import OutOfTime, WrongInput


class Cancelled(WrongInput):
    """A person cancelled a submitted run: it is not tried again behind their back."""


KINDS: dict[str, type[Exception]] = {**TOLD, OutOfTime.__name__: OutOfTime}
"""What a submitted run may end with that is made for a person to read; it is the same here, and retried as it would be
there."""

KIND = re.compile(rf"\b({'|'.join(KINDS)}): (.*)", re.DOTALL)
"""An exception as the message of a Prefect state names it."""


def told_by(message: str) -> Exception | None:
    """Return what a submitted run ended with, of `KINDS`, from the message of its state; None where it is none."""
    found = KIND.search(message)
    return None if found is None else KINDS[found[1]](found[2])
