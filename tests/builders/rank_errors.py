"""Real ranks that raise an unexpected error wherever they are at a chosen moment, or wait after an epoch."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RAISE = """
import ctypes, os, threading, time

def fail():
    while not os.path.exists({trigger!r}):
        time.sleep(0.01)
    main = ctypes.c_ulong(threading.main_thread().ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(ZeroDivisionError))

if (os.environ.get("HOROVOD_RANK") or os.environ.get("RANK")) == "1":
    threading.Thread(target=fail, daemon=True).start()
"""
"""A module that Python imports when a process starts: after a file appears, rank 1 raises an error wherever it is."""


WAIT = """
import time
from tasks.launch.protocol import Reporter

send = Reporter.send

def send_and_wait(self, event):
    send(self, event)
    if "ends_training" in event:
        time.sleep(600)

Reporter.send = send_and_wait
"""
"""A module that Python imports when a process starts: after an epoch, rank 0 waits until it is told to end."""


class ErrorAfterEpoch:
    """The moment of the error, for the events of a training run: some time after the first epoch of its launch."""

    def __init__(self, trigger: Path, seconds: float) -> None:
        """Set the moment.

        Args:
            trigger: The file on which rank 1 raises the error.
            seconds: The time from the epoch to the error.
        """
        self.seconds = seconds
        self._trigger = trigger
        self._at: float | None = None

    def __call__(self, _event: object) -> None:
        """Handle an epoch."""
        if self._at is None:
            self._at = time.monotonic() + self.seconds
            threading.Timer(self.seconds, self._trigger.touch).start()

    @property
    def ago(self) -> float:
        """Seconds since the error."""
        assert self._at is not None, "training ended before its first epoch"
        return time.monotonic() - self._at


@contextmanager
def _imported_at_start(folder: Path, module: str) -> Iterator[None]:
    """Let the processes that the block starts import a module first, from a folder to create."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@contextmanager
def wait_after_an_epoch(folder: Path) -> Iterator[None]:
    """Let rank 0 of the training run that the block launches wait after an epoch until it is told to end.

    Args:
        folder: Folder to create, from which the ranks import it.
    """
    with _imported_at_start(folder, WAIT):
        yield


@contextmanager
def error_in_rank_1(folder: Path, seconds: float) -> Iterator[ErrorAfterEpoch]:
    """Prepare a ZeroDivisionError in rank 1 of the training run that the block launches.

    Args:
        folder: Folder to create, from which the ranks import it.
        seconds: The time from an epoch to the error.

    Yields:
        What the training run calls with its events.
    """
    trigger = folder / "raise"
    with _imported_at_start(folder, RAISE.format(trigger=str(trigger))):
        yield ErrorAfterEpoch(trigger, seconds)
