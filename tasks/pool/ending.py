"""What a run on a work pool ended with, as whoever waits for it is told."""

import re

from tasks.distributed.spec import TOLD
from tasks.errors import OutOfTime, WrongInput


class Cancelled(WrongInput):
    """A person cancelled a submitted run: it is not tried again behind their back."""


KINDS: dict[str, type[Exception]] = {**TOLD, OutOfTime.__name__: OutOfTime}
"""What a submitted run may end with that is made for a person to read; it is the same here, and retried as it would be
there."""

KIND = re.compile(rf"(.*) \(({'|'.join(KINDS)})\)", re.DOTALL)
"""An exception as `tasks.orchestration.failure.state_message` names it: the sentence, then the kind."""


def told_by(message: str) -> Exception | None:
    """Return what a submitted run ended with, of `KINDS`, from the message of its state; None where it is none."""
    found = KIND.fullmatch(message)
    return None if found is None else KINDS[found[2]](found[1])
