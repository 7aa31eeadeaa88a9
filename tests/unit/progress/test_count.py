"""How far a step is."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import worker_log
from tasks.progress import count
from tasks.progress.count import Standing, advance, counted, heard_by
from tasks.worker_log import WorkerCount, forward_worker_lines


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Standing]:
    """Return what a listener hears, which is told each change."""
    monkeypatch.setattr(count, "TELL_SECONDS", 0.0)
    return []


def test_parts_add_up_and_one_that_is_done_again_counts_once(heard: list[Standing]) -> None:
    """A lost executor's task begins anew, and the end is the total."""
    with heard_by(heard.append), counted("etl", 10):
        for part, done in (("0", 2), ("1", 3), ("0", 1), ("1", 4)):
            advance("etl", part, done)
        advance("cache", "0", 5)
    assert [standing.done for standing in heard] == [0, 2, 5, 5, 6, 10]
    assert {standing.step for standing in heard} == {"etl"}


def test_a_failed_step_does_not_end_as_done(heard: list[Standing]) -> None:
    """And what comes after it is not counted."""
    with heard_by(heard.append):
        with pytest.raises(ValueError, match="no"), counted("etl", 10):
            raise ValueError("no")
        advance("etl", "0", 5)
    assert [standing.done for standing in heard] == [0]


def test_a_listener_that_fails_ends_no_step(heard: list[Standing], said: Callable[[str], list[str]]) -> None:
    """It is told, and the others hear as before."""

    def fail(_standing: Standing) -> None:
        raise OSError("the terminal is gone")

    with heard_by(fail), heard_by(heard.append), counted("etl", 10):
        advance("etl", "0", 5)
    assert [standing.done for standing in heard] == [0, 5, 10]
    assert said("lakevision.progress") == ["the progress of 'etl' could not be shown: the terminal is gone"] * 3


def test_tellings_are_throttled_and_the_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a step is counted."""
    monkeypatch.setattr(count, "TELL_SECONDS", 3600.0)
    heard: list[Standing] = []
    with heard_by(heard.append), counted("etl", 1000):
        for done in range(1000):
            advance("etl", "0", done)
    assert [standing.done for standing in heard] == [0, 1000]


@pytest.mark.parametrize(
    ("standing", "text"),
    [
        (Standing("etl", 0, 10, 0.0), "0 of 10 images"),
        (Standing("etl", 1200, 8000, 5.0), "1,200 of 8,000 images, 240 images/s, 28 s left"),
        (Standing("etl", 10, 36010, 1.0), "10 of 36,010 images, 10 images/s, 1 h 0 min left"),
        (Standing("etl", 10, 10, 2.0), "10 of 10 images, 5 images/s"),
    ],
)
def test_a_standing_is_said_with_rate_and_time_left(standing: Standing, text: str) -> None:
    """As far as they are known."""
    assert str(standing) == text


def test_lines_of_workers_reach_the_count(
    heard: list[Standing], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this driver alone: runs under one home write into one file, and a torn line is none."""
    monkeypatch.setattr(worker_log, "TELL_SECONDS", 0.0)
    for driver in (os.getpid(), os.getpid() + 1):
        of_task = WorkerCount("etl", driver)
        of_task.add(3)
        of_task.add(1)
    lines = capfd.readouterr().err
    log = tmp_path / "spark.log"
    log.touch()
    with heard_by(heard.append), counted("etl", 10):
        with forward_worker_lines(log):
            log.write_text(f"{lines}{worker_log.PROGRESS_MARK}{os.getpid()} etl 5 lake\n")
        time.sleep(0)
    assert [standing.done for standing in heard] == [0, 3, 4, 10]
