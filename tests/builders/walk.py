"""The walk of a reader through the code: functions in the order in which they are first called, and their files.

A reader follows the calls, and reads a function where it is called for the first time: a walk has each function once. A
file is entered with the first of its functions. Where the walk leaves a file and comes back for another of its
functions, that is a return to it. Repeated calls, resumed generators, comprehensions and imports do not count.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

from tests.builders.processes import ROOT

OURS = tuple(str(ROOT / folder) + "/" for folder in ("flows", "tasks"))

NO_FUNCTIONS = {"<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Names of code that is a part of the text around it."""


class StopWalk(Exception):
    """The walk is at its end."""


@dataclass(frozen=True)
class Walk:
    """A walk: the file, relative to the checkout, and the name of each function, in the order of the first calls."""

    steps: tuple[tuple[str, str], ...]

    def within(self, *folders: str) -> "Walk":
        """Return the part in the files below some folders; a reader knows the other functions by their names."""
        return Walk(tuple(step for step in self.steps if step[0].startswith(tuple(f"{name}/" for name in folders))))

    def without(self, *files: str) -> "Walk":
        """Return the part in other files."""
        return Walk(tuple(step for step in self.steps if step[0] not in files))

    @property
    def num_files(self) -> int:
        """Number of files that are entered."""
        return len({file for file, _function in self.steps})

    @property
    def num_returns(self) -> int:
        """Number of returns to a file that was entered and left before."""
        files = [file for file, _function in self.steps]
        visits = len(files[:1]) + sum(before != file for before, file in pairwise(files))
        return visits - self.num_files

    def __str__(self) -> str:
        """Return the two numbers."""
        return f"{self.num_files} files entered, {self.num_returns} returns to one of them"


def walk(
    function: Callable[[], object],
    see: Callable[[FrameType], None] = lambda _frame: None,
    is_step: Callable[[CodeType], bool] = lambda _code: True,
) -> Walk:
    """Call a function, and return the walk through this project's code, in the thread of the caller.

    Args:
        function: The function.
        see: Called with the frame of each call; the walk ends where it raises StopWalk.
        is_step: Returns whether a function is a step of the walk.
    """
    called: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in NO_FUNCTIONS and code.co_filename.startswith(OURS):
            called.setdefault(code)
            see(frame)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with suppress(StopWalk):
            function()
    finally:
        sys.setprofile(before)
    steps = filter(is_step, called)
    return Walk(tuple((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname) for code in steps))
