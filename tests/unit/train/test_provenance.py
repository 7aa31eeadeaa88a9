"""Provenance of training runs, and its comparison."""

import subprocess
from pathlib import Path

import pytest
import torch

import tasks
from tasks.config.train import TrainConfig
from tasks.storage import Storage
from tasks.tracking.runs import code_commit, package_versions
from tasks.tracking.tracked_run import TrackedRun
from tasks.train.provenance import (
    MAX_NOTE_LENGTH,
    append_to_note,
    current_provenance,
    expected_provenance,
    provenance_changes,
    recorded_provenance,
)

CPU = torch.device("cpu")


def test_expected_provenance_equals_that_of_the_ranks() -> None:
    """The provenance expected before ranks start has the names and values of a rank."""
    current = current_provenance(CPU, None)
    threads = torch.get_num_threads()

    expected = expected_provenance(TrainConfig(device="cpu", precision="fp32", num_threads=threads), 32, num_ranks=2)

    assert expected == current
    assert current.keys() == {
        *("the device", "the processor", "the precision", "the number of threads", "the code"),
        *package_versions(),
    }
    assert current["the number of threads"] == str(threads)


def test_changes_have_the_old_and_the_new_value() -> None:
    """A value that was unknown before is not a change."""
    now = current_provenance(CPU, None)
    before = now | {"the device": "cuda", "torch": "1.0"}

    assert provenance_changes(now, now) == []
    assert provenance_changes(before, now) == ["the device was cuda and is cpu", f"torch was 1.0 and is {now['torch']}"]
    assert provenance_changes({"the device": "cpu"}, now) == []


def test_provenance_of_a_run_comes_from_its_parameters(storage: Storage) -> None:
    """A run has the parameters from when it was opened, and a new run has none."""
    params = {"device": "cuda:1", "num_threads": "4", "version.torch": "1.0", "train.seed": "3"}

    assert recorded_provenance(TrackedRun(storage, "r", "abc", params)) == {
        "the device": "cuda",
        "the number of threads": "4",
        "the code": "abc",
        "torch": "1.0",
    }
    assert (
        provenance_changes(
            recorded_provenance(TrackedRun(storage, "r", code_commit())),
            current_provenance(CPU, None),
        )
        == []
    )


def test_code_in_a_repository_without_a_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project whose first commit is still to come has no version of its code."""
    monkeypatch.delenv("LAKEVISION_CODE_VERSION", raising=False)
    monkeypatch.setattr(tasks, "__file__", str(tmp_path / "__init__.py"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert code_commit() is None


def test_note_is_appended_to_the_existing_one() -> None:
    """A note that is too long keeps its end."""
    first = append_to_note(None, ["torch was 1 and is 2", "the code was a and is b"])

    assert first == "torch was 1 and is 2; the code was a and is b"
    assert append_to_note(first, ["torch was 2 and is 1"]) == f"{first}; then torch was 2 and is 1"
    long = append_to_note("x" * MAX_NOTE_LENGTH, ["torch was 2 and is 1"])
    assert len(long) == MAX_NOTE_LENGTH
    assert long.endswith("; then torch was 2 and is 1")
