"""The thread that writes the latest values, which a slow or lost server must not delay."""

import threading

import pytest

from tasks.orchestration.progress_artifacts import LatestWriter


def test_last_value_of_each_name_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """Values that come while the thread writes replace each other; the end writes those that are left."""
    written: list[tuple[str, int]] = []
    begun, go_on = threading.Event(), threading.Event()

    def write(name: str, value: int) -> None:
        begun.set()
        assert go_on.wait(60)
        written.append((name, value))

    writer = LatestWriter(write, least_seconds=3600)
    writer.put("a", 1)
    assert begun.wait(60)
    for value in (2, 3):
        writer.put("a", value)
    writer.put("b", 4)
    go_on.set()
    writer.end()
    assert written == [("a", 1), ("a", 3), ("b", 4)]
    assert caplog.records == []


def test_failure_is_logged_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next value is tried again."""
    monkeypatch.setattr("tasks.orchestration.progress_artifacts.UNAVAILABLE_SECONDS", 0.0)
    tried: list[int] = []
    both = threading.Event()

    def fail(_name: str, value: int) -> None:
        tried.append(value)
        if len(tried) == 2:
            both.set()
        raise OSError("no server")

    writer = LatestWriter(fail)
    writer.put("a", 1)
    while not tried:
        threading.Event().wait(0.01)
    writer.put("a", 2)
    assert both.wait(60)
    writer.end()
    assert tried == [1, 2]
    assert [record.getMessage() for record in caplog.records] == ["the progress of 'a' could not be shown: no server"]
