"""Signals that end a process, turned into what Ctrl-C does."""

import signal


def interrupt_on(*numbers: signal.Signals) -> None:
    """Raise KeyboardInterrupt in the main thread when one of these signals comes; an ignored one stays ignored."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in numbers:
        # `nohup` keeps its meaning.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
