"""Functions that are called to their end although signals raise exceptions."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextvars import ContextVar

import pytest

from tasks.system.signals import run_uninterrupted

pytestmark = pytest.mark.usefixtures("interrupted_by_sigterm")


def test_signals_are_raised_after_the_function() -> None:
    """It ends although two signals come meanwhile, each of which interrupts the wait for it."""
    ended = []

    def work() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        ended.append("work")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_uninterrupted(work)
    assert ended == ["work"]


@pytest.mark.timeout(60)
def test_signals_that_arrive_together_are_raised_after_the_function() -> None:
    """A second one comes while the exception of the first is handled, thousands of times."""
    ended, cancelled = [], []
    sender = "import os, signal, time\nuntil = time.monotonic() + 2\nwhile time.monotonic() < until:\n    "
    sender += f"os.kill({os.getpid()}, signal.SIGTERM)"

    def work() -> None:
        subprocess.run([sys.executable, "-c", sender], check=True)
        ended.append("work")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_uninterrupted(work, lambda: cancelled.append("work"))
    assert (ended, cancelled) == (["work"], ["work"])


class LimitReached(Exception):
    """The exception of a time limit."""


def test_time_limit_of_a_thread_is_raised_after_the_function_and_cancels_it() -> None:
    """Prefect raises the exception of a time limit in the thread of the run, which need not be the main one."""
    told, found = threading.Event(), []

    def work() -> None:
        found.append(told.wait(60))

    def run() -> None:
        try:
            run_uninterrupted(work, told.set)
        except LimitReached:
            found.append("raised")

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(LimitReached))
    thread.join()
    assert found == [True, "raised"]


def test_result_and_error_are_those_of_the_function() -> None:
    """Without signals, as if it were called; it sees the context variables of its caller."""
    variable = ContextVar[str]("variable")
    variable.set("caller's")
    assert run_uninterrupted(variable.get) == "caller's"
    with pytest.raises(ZeroDivisionError):
        run_uninterrupted(lambda: 1 // 0)
    assert run_uninterrupted(threading.current_thread) is not threading.main_thread()
