"""Number formats, and how many pictures a step may have."""

import pytest
import torch

from tasks.errors import WrongInput
from tasks.train.model import build_classifier
from tasks.train.precision import activation_bytes, choose_precision, computes_bf16, largest_batch

CPU = torch.device("cpu")


def test_fp32_is_the_format_of_the_weights() -> None:
    """Asked for, it is taken on any device."""
    assert choose_precision("fp32", CPU) is None


def test_auto_takes_bf16_where_the_device_computes_in_it() -> None:
    """And float32 elsewhere, where bf16 is refused with the way out."""
    if computes_bf16(CPU):
        assert choose_precision("auto", CPU) == choose_precision("bf16", CPU) == torch.bfloat16
    else:
        assert choose_precision("auto", CPU) is None
        with pytest.raises(WrongInput, match=r"train.precision is 'bf16' and cpu has no instructions for it"):
            choose_precision("bf16", CPU)


def test_activations_grow_with_the_batch_and_leave_no_trace() -> None:
    """Twice the pictures keep twice the bytes; weights, batch norm and gradients are as before."""
    classifier = build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=False)
    before = {name: value.clone() for name, value in classifier.state_dict().items()}

    small, large = (activation_bytes(classifier, 32, pictures) for pictures in (4, 8))

    assert 1.8 < large / small < 2.2
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_a_frozen_backbone_keeps_less() -> None:
    """Only what the head's gradient needs."""
    whole = build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=False)
    frozen = build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=True)
    assert activation_bytes(frozen, 32, 8) < activation_bytes(whole, 32, 8) / 10


def test_the_largest_batch_leaves_an_epoch_its_steps() -> None:
    """A power of two, of which at least 20 steps make an epoch on all ranks."""
    classifier = build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=False)
    assert largest_batch(classifier, 32, num_rows=1_000, num_ranks=1, device=CPU) == 32
    assert largest_batch(classifier, 32, num_rows=1_000, num_ranks=2, device=CPU) == 16
    assert largest_batch(classifier, 32, num_rows=3, num_ranks=1, device=CPU) == 1


def test_the_largest_batch_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half the free memory; on a machine with a thousandth of it, it is smaller."""
    classifier = build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=False)
    a_picture = activation_bytes(classifier, 64, 8) / 8

    class Memory:
        available = 2 * 40 * a_picture

    monkeypatch.setattr("tasks.train.precision.psutil.virtual_memory", Memory)
    assert largest_batch(classifier, 64, num_rows=1_000_000, num_ranks=1, device=CPU) == 32


def test_small_pictures_are_no_case_for_bf16_on_a_cpu() -> None:
    """Gradients on feature maps of one pixel are not to be trusted there."""
    assert choose_precision("auto", CPU, 32) is None
