"""What a training is computed on and with: what is compared, and what is not known."""

import torch

from tasks import tracking
from tasks.config.train import TrainConfig
from tasks.train.provenance import (
    MAX_NOTE_LENGTH,
    changes,
    checkpoint_provenance,
    current_provenance,
    expected_provenance,
    note_of,
    recorded_provenance,
)

CPU = torch.device("cpu")


def test_what_would_be_computed_on_is_what_is_computed_on() -> None:
    """The same names and values before ranks start and within one."""
    within = current_provenance(CPU, None)
    threads = torch.get_num_threads()

    foreseen = expected_provenance(TrainConfig(device="cpu", precision="fp32", num_threads=threads), 32, num_ranks=2)

    assert foreseen == within
    assert within.keys() == {
        *("the device", "the processor", "the precision", "the number of threads", "the code"),
        *tracking.package_versions(),
    }
    assert within["the number of threads"] == str(threads)


def test_each_change_is_named_by_what_was_and_what_is() -> None:
    """What was not known then is no change."""
    now = current_provenance(CPU, None)
    before = now | {"the device": "cuda", "torch": "1.0"}

    assert changes(now, now) == []
    assert changes(before, now) == ["the device was cuda and is cpu", f"torch was 1.0 and is {now['torch']}"]
    assert changes({"the device": "cpu"}, now) == []


def test_a_checkpoint_of_before_says_device_and_number_format() -> None:
    """It was a text then; a training that had not yet said it had an empty one."""
    now = current_provenance(CPU, None)

    assert checkpoint_provenance("cuda in bfloat16") == {"the device": "cuda", "the precision": "bfloat16"}
    assert checkpoint_provenance("") == {}
    assert checkpoint_provenance(now) == now
    assert changes(checkpoint_provenance("cpu in float32"), now) == []


def test_a_run_says_what_it_was_begun_with_by_its_parameters() -> None:
    """Those that it had when it was opened: a new one has none."""
    params = {"device": "cuda:1", "num_threads": "4", "version.torch": "1.0", "train.seed": "3"}

    assert recorded_provenance(tracking.TrackedRun("r", "abc", params)) == {
        "the device": "cuda",
        "the number of threads": "4",
        "the code": "abc",
        "torch": "1.0",
    }
    assert (
        changes(recorded_provenance(tracking.TrackedRun("r", tracking.code_commit())), current_provenance(CPU, None))
        == []
    )


def test_a_note_keeps_what_was_noted_before() -> None:
    """And of too many changes the last ones."""
    first = note_of(None, ["torch was 1 and is 2", "the code was a and is b"])

    assert first == "torch was 1 and is 2; the code was a and is b"
    assert note_of(first, ["torch was 2 and is 1"]) == f"{first}; then torch was 2 and is 1"
    long = note_of("x" * MAX_NOTE_LENGTH, ["torch was 2 and is 1"])
    assert len(long) == MAX_NOTE_LENGTH
    assert long.endswith("; then torch was 2 and is 1")
