"""Traces of training steps by torch's profiler."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch

from tasks.config.train import TrainConfig
from tasks.train.step_callback import TracedSteps


def step() -> None:
    """Multiply two matrices, as a step."""
    torch.ones(4, 4) @ torch.ones(4, 4)


def recorded(folder: Path) -> int:
    """Return the number of products of matrices in a trace."""
    with gzip.open(folder / "phase-00.json.gz") as file:
        return sum(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])


@pytest.mark.parametrize(("num_steps", "expected"), [(4, 4), (50, 7)])
def test_steps_after_the_first_ones_are_recorded(tmp_path: Path, num_steps: int, expected: int) -> None:
    """As many as were chosen, or all until the end of the phase."""
    traced = TracedSteps(num_steps, "phase-00.json.gz", lambda folder: shutil.copytree(folder, tmp_path / "logged"))
    for _ in range(10):
        step()
        traced.after_step()
    traced.end()
    traced.end()
    assert recorded(tmp_path / "logged") == expected


def test_short_phase_has_no_trace_and_a_server_that_is_away_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the trace."""

    def refuse(_folder: Path) -> None:
        raise ConnectionError("no answer")

    short = TracedSteps(5, "phase-00.json.gz", refuse)
    short.after_step()
    short.end()
    assert caplog.messages == []
    traced = TracedSteps(1, "phase-00.json.gz", refuse)
    for _ in range(5):
        step()
        traced.after_step()
    assert caplog.messages == ["the trace phase-00.json.gz was not logged: no answer"]


def test_trace_and_histograms_do_not_change_the_run() -> None:
    """A finished run is not trained again for them."""
    settings = {"weights": "none", "freeze_backbone": False}
    assert TrainConfig(**settings, trace_steps=10, histograms=True).decisive() == TrainConfig(**settings).decisive()
