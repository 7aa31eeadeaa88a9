"""Tests of the progress counters of steps."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.progress import count
from tasks.progress.count import EpochProgress, StepProgress, advance, counted, listener
from tasks.spark import worker_log
from tasks.spark.worker_log import EndedParts, EndedTasks, WorkerCount, forward_worker_lines, num_tasks


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[StepProgress]:
    """Return the list for the updates of a listener, without throttling."""
    monkeypatch.setattr(count, "UPDATE_SECONDS", 0.0)
    return []


def test_parts_add_up_and_a_repeated_part_counts_once(updates: list[StepProgress]) -> None:
    """The task of a lost executor starts again without reducing the count, and the step ends with its total."""
    with listener(updates.append), counted("etl", 10):
        for part, done in (("0", 2), ("1", 3), ("0", 1), ("1", 4)):
            advance("etl", part, done)
        advance("cache", "0", 5)
    assert [progress.done for progress in updates] == [0, 2, 5, 5, 6, 10]
    assert {progress.step for progress in updates} == {"etl"}


def test_failed_step_does_not_end_as_done(updates: list[StepProgress]) -> None:
    """Images that are reported after its end are not counted."""
    with listener(updates.append):
        with pytest.raises(ValueError, match="no"), counted("etl", 10):
            raise ValueError("no")
        advance("etl", "0", 5)
    assert [progress.done for progress in updates] == [0]


def test_failing_listener_does_not_end_the_step(
    updates: list[StepProgress], messages_of: Callable[[str], list[str]]
) -> None:
    """The failure is logged, and the other listeners get every update."""

    def fail(_progress: StepProgress) -> None:
        raise OSError("the terminal is gone")

    with listener(fail), listener(updates.append), counted("etl", 10):
        advance("etl", "0", 5)
    assert [progress.done for progress in updates] == [0, 5, 10]
    assert messages_of("lakevision.progress") == ["the progress of 'etl' could not be shown: the terminal is gone"] * 3


def test_updates_are_throttled_except_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners get only the first and the last update within the minimum interval."""
    monkeypatch.setattr(count, "UPDATE_SECONDS", 3600.0)
    updates: list[StepProgress] = []
    with listener(updates.append), counted("etl", 1000):
        for done in range(1000):
            advance("etl", "0", done)
    assert [progress.done for progress in updates] == [0, 1000]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (StepProgress("etl", 0, 10, 0.0), "0 of 10 images"),
        (StepProgress("etl", 1200, 8000, 5.0), "1,200 of 8,000 images, 240 images/s, 28 s left"),
        (StepProgress("etl", 10, 36010, 1.0), "10 of 36,010 images, 10 images/s, 1 h 0 min left"),
        (StepProgress("etl", 10, 10, 2.0), "10 of 10 images, 5 images/s"),
        (StepProgress("a-epochs", 0, 20, 0.0, "epochs"), "0 of 20 epochs"),
        (StepProgress("a-epochs", 2, 20, 60.0, "epochs", "val loss 1"), "2 of 20 epochs, val loss 1, 9 min 0 s left"),
    ],
)
def test_text_of_progress_has_rate_and_time_left(progress: StepProgress, text: str) -> None:
    """Rate and remaining time are omitted while they are unknown."""
    assert str(progress) == text


def test_epochs_are_counted_and_a_training_run_that_stops_early_is_done(
    updates: list[StepProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining time of a resumed run is estimated from the epochs that its own process trained."""
    clock = iter([100.0, 110.0, 120.0, 121.0])
    monkeypatch.setattr("tasks.progress.count.time.monotonic", lambda: next(clock))
    with listener(updates.append):
        epochs = EpochProgress("train", 20)
        for epoch, accuracy in ((5, 0.5), (6, 0.75)):
            epochs.update({"epoch": epoch, "max_epochs": 20, "val_accuracy": accuracy})
        epochs.end()
    assert [(progress.done, progress.total, progress.note) for progress in updates] == [
        (0, 20, ""), (5, 20, "val accuracy 0.5000"), (6, 20, "val accuracy 0.7500"), (6, 6, "val accuracy 0.7500"),
    ]  # fmt: skip
    assert [progress.seconds_left for progress in updates] == [None, 10.0 * 15, 10.0 * 14, 0.0]
    assert {progress.step for progress in updates} == {"train-epochs"}


def test_log_lines_of_workers_are_counted(
    updates: list[StepProgress], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only complete lines of this driver are counted, since all runs under one home write to the same file.

    Another run may rotate the file.
    """
    monkeypatch.setattr(worker_log, "UPDATE_SECONDS", 0.0)
    for driver in (os.getpid(), os.getpid() + 1):
        of_task = WorkerCount("etl", driver)
        of_task.add(3)
        of_task.add(1)
    lines = capfd.readouterr().err
    log = tmp_path / "spark.log"
    log.touch()
    with listener(updates.append), counted("etl", 10), forward_worker_lines(log):
        log.write_text(f"{lines}{worker_log.PROGRESS_MARK}{os.getpid()} etl 5 lake\n")
        while updates[-1].done < 4:
            time.sleep(0.05)
        log.write_text(f"{worker_log.PROGRESS_MARK}{os.getpid()} etl 1 2\n")
    assert [progress.done for progress in updates] == [0, 3, 4, 6, 10]


def test_ended_task_is_counted_on_the_driver_without_its_log_lines(
    updates: list[StepProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log lines of a cluster stay on its machines; a task that is run again counts once."""
    ended, on_worker = EndedTasks(), SimpleNamespace(partitionId=lambda: 3)
    monkeypatch.setattr("tasks.spark.worker_log.TaskContext.get", lambda: on_worker)
    monkeypatch.setattr("tasks.spark.worker_log.TaskContext.get", lambda: on_worker)
    held: list[EndedParts] = [ended.zero(())]
    accumulator = SimpleNamespace(add=lambda term: held.append(ended.addInPlace(held[-1], term)))
    for images in (4, 7):
        of_task = WorkerCount("etl", -1, accumulator)  # type: ignore[arg-type]  # a stand-in with the attributes that are used
        of_task.add(images)
        of_task.close()
    assert held[-1] == (("etl", "3", 4), ("etl", "3", 7))
    monkeypatch.setattr("tasks.spark.worker_log.TaskContext.get", lambda: None)
    with listener(updates.append), counted("etl", 10):
        assert ended.addInPlace(ended.zero(()), held[-1]) == ()
        assert ended.addInPlace(ended.zero(()), (("etl", "0", 1),)) == ()
    assert [progress.done for progress in updates] == [0, 4, 7, 8, 10]


@pytest.mark.parametrize(
    ("rows", "least", "num"),
    [(0, 4, 4), (100, 4, 4), (30_000, 4, 6), (1_000_000, 4, 32), (1_000_000, 8, 32), (100_000, 40, 40)],
)
def test_large_step_has_more_tasks_than_cores(rows: int, least: int, num: int) -> None:
    """With four cores: more tasks give finer progress, but each has an overhead."""
    assert num_tasks(rows, 4, least) == num
