"""Termination signals, handled like Ctrl-C and deferred during critical sections."""

import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
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


def run_uninterrupted(function: Callable[[], T]) -> T:
    """Call a function to its end, although signals raise exceptions meanwhile; the last of these is raised then.

    The handlers stay those of the process, of which other parts of it may expect something. They raise their exceptions
    in the main thread alone, so the function is called in another one.

    Args:
        function: What to call. It must end by itself.

    Raises:
        Exception: That of the function, unless a signal has raised one.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    called, begins = Future[T](), threading.Lock()
    context = contextvars.copy_context()

    def call() -> None:
        if begins.acquire(blocking=False):  # A signal may come after the start of a thread, and before it is known.
            try:
                called.set_result(context.run(function))
            except BaseException as error:  # raised in the main thread
                called.set_exception(error)

    raised: BaseException | None = None
    while not called.done():
        try:
            if not begins.locked():
                threading.Thread(target=call, name="uninterrupted", daemon=True).start()
            wait([called])
        except BaseException as error:  # any that a handler raises
            raised = error
    if raised is not None:
        raise raised
    return called.result()
