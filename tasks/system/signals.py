"""Termination signals, handled like Ctrl-C and deferred during critical sections."""

import contextvars
import ctypes
import os
import signal
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


class _State:
    """The deferred signal; handlers run in the main thread between two of its instructions."""

    depth = 0
    deferred: str | None = None


def interrupt_on(*numbers: signal.Signals, once: bool = False) -> None:
    """Raise KeyboardInterrupt in the main thread on these signals, except on those that are ignored.

    Within `defer_signals`, the first signal is deferred until its end; a second one is not.

    Args:
        numbers: The signals.
        once: Ignore all of them after the first, so that the shutdown is not interrupted.
    """

    def interrupt(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if once:
            for each in numbers:
                signal.signal(each, signal.SIG_IGN)
        if _State.depth and _State.deferred is None:
            _State.deferred = name
            return
        raise KeyboardInterrupt(name)

    for number in numbers:
        # Respect `nohup`, which ignores SIGHUP.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer the signals of `interrupt_on` until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread handles signals.
        return
    _State.depth += 1
    name = None
    try:
        yield
    finally:
        _State.depth -= 1
        if _State.depth == 0:
            name, _State.deferred = _State.deferred, None
    if name is not None:
        raise KeyboardInterrupt(name)


def shutdown_requested() -> bool:
    """Return whether a signal has been deferred to the end of `defer_signals`."""
    return _State.deferred is not None


WATCH_SECONDS = 1.0
"""Interval of the looks of `end_with_parent`."""


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM when its parent has ended, whatever ended it; return at once.

    Args:
        parent: Process id of the parent, which may have ended already.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lakevision-parent", daemon=True).start()


WAIT_SECONDS = 0.5
"""Longest wait of `run_uninterrupted` for its function: the time limit of a thread is raised between two waits."""

_PYTHON = ctypes.CDLL(None)
"""Python's own C functions, which, unlike those of `ctypes.pythonapi`, let other threads run."""
_new_lock, _free_lock = _PYTHON.PyThread_allocate_lock, _PYTHON.PyThread_free_lock
_acquire, _release = _PYTHON.PyThread_acquire_lock, _PYTHON.PyThread_release_lock
_new_lock.restype = ctypes.c_void_p
_acquire.argtypes = (ctypes.c_void_p, ctypes.c_int)
_release.argtypes = _free_lock.argtypes = (ctypes.c_void_p,)


def run_uninterrupted(function: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
    """Call a function that exceptions of signals and time limits do not interrupt; raise the last of these after it.

    The handlers stay as they are: Prefect's worker announces a cancellation only to a process that has Prefect's own.
    Handlers run in the main thread, and time limits in the thread that they are set for: the function is called in
    another one. A second signal may arrive while the exception of the first is handled, where no `except` clause
    catches it. But Python raises nothing between the entry of a `finally` clause and the return of its first C
    function: here, the wait for the other thread.

    Args:
        function: What to call. It must end by itself.
        cancel: Called in a thread at the first of these exceptions, so that the function ends sooner.

    Raises:
        BaseException: That of the function, unless a handler or a time limit has raised one.
    """
    results, errors = list[T](), list[BaseException]()
    # Of C code alone: an exception within an event or a future would leave its lock held.
    begins, runs, interrupted = threading.Lock(), threading.Lock(), threading.Lock()
    context = contextvars.copy_context()
    runs.acquire()
    interrupted.acquire()
    ended = _new_lock()
    _acquire(ended, 1)

    def call() -> None:
        if not begins.acquire(blocking=False):
            return  # A handler raised RuntimeError after the thread was started.
        try:
            results.append(context.run(function))
        except BaseException as error:
            errors.append(error)
        finally:
            runs.release()
            _release(ended)

    def cancel_if_interrupted(cancel: Callable[[], None]) -> None:
        interrupted.acquire()
        if not (results or errors):
            cancel()

    weakref.finalize(call, _free_lock, ended)
    if cancel is not None:
        with suppress(RuntimeError):
            start_new_thread(cancel_if_interrupted, (cancel,))
    try:
        try:
            try:
                start_new_thread(call, ())  # First of all: after an exception before it, the wait below would not end.
            except RuntimeError:  # No other thread can be started.
                _release(ended)
                call()
            while not runs.acquire(timeout=WAIT_SECONDS):
                pass
        finally:
            interrupted.release()
    finally:
        _acquire(ended, 1)
    if errors:
        raise errors[0]
    return results[0]
