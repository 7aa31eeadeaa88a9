"""Signals that end a process, turned into what Ctrl-C does, and held back where that would tear something."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    """What came while signals were held back; handlers run in the main thread between two of its instructions."""

    depth = 0
    held: str | None = None


def interrupt_on(*numbers: signal.Signals, once: bool = False) -> None:
    """Raise KeyboardInterrupt in the main thread when one of these signals comes; an ignored one stays ignored.

    Within `defer_signals` the first one waits for its end. A second one does not.

    Args:
        numbers: The signals.
        once: Hear the first of them alone, and let what it began be ended in peace.
    """

    def interrupt(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if once:
            for heard in numbers:
                signal.signal(heard, signal.SIG_IGN)
        if _State.depth and _State.held is None:
            _State.held = name
            return
        raise KeyboardInterrupt(name)

    for number in numbers:
        # `nohup` keeps its meaning.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let no signal of `interrupt_on` end the process meanwhile; what came does so afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals come to the main thread alone.
        return
    _State.depth += 1
    name = None
    try:
        yield
    finally:
        _State.depth -= 1
        if _State.depth == 0:
            name, _State.held = _State.held, None
    if name is not None:
        raise KeyboardInterrupt(name)


def shutdown_requested() -> bool:
    """Say whether a signal waits for the end of `defer_signals`."""
    return _State.held is not None
