"""The clock from the start of a process to its first training step."""

import logging

import pytest

from tasks.progress.start_clock import StartClock


def test_parts_are_logged_once_after_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """The line has the seconds of each part; later parts, as of another phase, are ignored."""
    times = iter([10.0, 15.2, 16.0, 18.5])
    clock = StartClock(lambda: next(times))
    caplog.set_level(logging.INFO, "lakevision.train")
    clock.begin()
    clock.passed("imports")
    clock.passed("preparation")
    clock.stepped()
    clock.passed("preparation")
    clock.stepped()
    assert caplog.messages == [
        "first step 8.5 s after the start of this process: imports 5.2 s, preparation 0.8 s, step 2.5 s"
    ]


def test_process_that_does_more_than_train_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """In a notebook, the first step may come hours after the start."""
    caplog.set_level(logging.INFO, "lakevision.train")
    clock = StartClock()
    clock.passed("preparation")
    clock.stepped()
    assert caplog.messages == []
