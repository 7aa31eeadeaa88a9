"""Tests of the event files, which are read with TensorBoard's own reader."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.metrics.evaluate import EpochMetrics
from tasks.report.report import scalar_tag, write_event_file
from tests.builders.finished_training import history_of


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard reads from a folder: steps and values by tag."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_metric_of_every_epoch_is_in_the_file(tmp_path: Path) -> None:
    """The step is the number of the epoch, and the tags of train and val of a metric have the same prefix."""
    history = history_of(4)

    write_event_file(tmp_path, history, "run")

    found = scalars(tmp_path)
    assert found.keys() == {scalar_tag(field.name) for field in fields(EpochMetrics)} - {"epoch"}
    assert {"loss/train", "loss/val", "accuracy/train", "learning_rate"} <= found.keys()
    assert found["loss/val"] == [(metrics.epoch, pytest.approx(metrics.val_loss)) for metrics in history]


def test_repeated_write_for_the_same_run_replaces_the_file(tmp_path: Path) -> None:
    """Each epoch is in the file once, with its newer value."""
    history = history_of(3)
    write_event_file(tmp_path / "first", history, "run")
    write_event_file(tmp_path / "second", [replace(metrics, val_loss=0.5) for metrics in history], "run")

    (first,), (second,) = (list((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert second.name == first.name
    second.replace(first)
    assert scalars(tmp_path / "first")["loss/val"] == [(0, 0.5), (1, 0.5), (2, 0.5)]
