"""What a training is computed on and with: what is compared, and what is not known."""

import torch

from tasks import tracking
from tasks.config.train import TrainConfig
from tasks.train.provenance import (
    MAX_NOTE_LENGTH,
    begun_with,
    changes,
    computed_on,
    note_of,
    of_checkpoint,
    would_compute_on,
)

CPU = torch.device("cpu")


def test_what_would_be_computed_on_is_what_is_computed_on() -> None:
    """The same names and values before ranks start and within one."""
    within = computed_on(CPU, None)
    threads = torch.get_num_threads()

    foreseen = would_compute_on(TrainConfig(device="cpu", precision="fp32", num_threads=threads), 32, num_ranks=2)

    assert foreseen == within
    assert within.keys() == {
        *("the device", "the processor", "the precision", "the number of threads", "the code"),
        *tracking.package_versions(),
    }
    assert within["the number of threads"] == str(threads)


def test_each_change_is_named_by_what_was_and_what_is() -> None:
    """What was not known then is no change."""
    now = computed_on(CPU, None)
    before = now | {"the device": "cuda", "torch": "1.0"}

    assert changes(now, now) == []
    assert changes(before, now) == ["the device was cuda and is cpu", f"torch was 1.0 and is {now['torch']}"]
    assert changes({"the device": "cpu"}, now) == []


def test_a_checkpoint_of_before_says_device_and_number_format() -> None:
    """It was a text then; a training that had not yet said it had an empty one."""
    now = computed_on(CPU, None)

    assert of_checkpoint("cuda in bfloat16") == {"the device": "cuda", "the precision": "bfloat16"}
    assert of_checkpoint("") == {}
    assert of_checkpoint(now) == now
    assert changes(of_checkpoint("cpu in float32"), now) == []


def test_a_run_says_what_it_was_begun_with_by_its_parameters() -> None:
    """Those that it had when it was opened: a new one has none."""
    params = {"device": "cuda:1", "num_threads": "4", "version.torch": "1.0", "train.seed": "3"}

    assert begun_with(tracking.TrackedRun("r", "abc", params)) == {
        "the device": "cuda",
        "the number of threads": "4",
        "the code": "abc",
        "torch": "1.0",
    }
    assert changes(begun_with(tracking.TrackedRun("r", tracking.code_commit())), computed_on(CPU, None)) == []


def test_a_note_keeps_what_was_noted_before() -> None:
    """And of too many changes the last ones."""
    first = note_of(None, ["torch was 1 and is 2", "the code was a and is b"])

    assert first == "torch was 1 and is 2; the code was a and is b"
    assert note_of(first, ["torch was 2 and is 1"]) == f"{first}; then torch was 2 and is 1"
    long = note_of("x" * MAX_NOTE_LENGTH, ["torch was 2 and is 1"])
    assert len(long) == MAX_NOTE_LENGTH
    assert long.endswith("; then torch was 2 and is 1")
