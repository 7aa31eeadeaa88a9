"""The walk of the learning rate: from `train_model` to the first `set_learning_rate`.

A reader who follows the rate enters the functions that are active when it is set. Of the functions before them, the
reader enters those whose code has a name of the rate (RATE): an argument, a local or an attribute.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from tests.builders.processes import ROOT
from tests.builders.walk import NO_FUNCTIONS, OURS, Walk

RATE = ("learning_rate", "schedule", "peak_rate")
"""Parts of the names of the number, of the factory and of the callable."""


class _Set(Exception):
    """The rate is set: the walk is at its end."""


def _has_rate(code: CodeType) -> bool:
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, code.co_qualname.lower())
    return any(part in name for name in names for part in RATE)


def walk_of_rate(train: Callable[[], object]) -> Walk:
    """Call a function that trains, until it sets the learning rate, and return the walk of the rate to there."""
    called: dict[CodeType, None] = {}
    active: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in NO_FUNCTIONS or not code.co_filename.startswith(OURS):
            return
        called.setdefault(code)
        if code.co_name == "set_learning_rate":
            caller: FrameType | None = frame
            while caller is not None:
                active.add(caller.f_code)
                caller = caller.f_back
            raise _Set

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train()
    except _Set:
        pass
    finally:
        sys.setprofile(before)
    assert active, "the learning rate was set"
    steps = (code for code in called if code in active or _has_rate(code))
    return Walk(tuple((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname) for code in steps))
