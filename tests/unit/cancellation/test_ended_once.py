"""The end of a flow run's process by SIGTERM."""

import os
import signal

import pytest
from prefect.exceptions import TerminationSignal

from tasks.cancellation.task import ended_once


def test_only_the_first_signal_ends_the_run() -> None:
    """A second one does not interrupt what the first one has begun to end; afterwards, the former handler is back."""
    before = signal.getsignal(signal.SIGTERM)
    ended = []

    def end_work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append("all")

    @ended_once()
    def run() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            end_work()

    with pytest.raises(TerminationSignal):
        run()
    assert ended == ["all"]
    assert signal.getsignal(signal.SIGTERM) is before
