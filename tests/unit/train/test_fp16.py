"""Training in float16: the loss is scaled, and steps whose gradients overflow are left out."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from tasks.collectives.reducer import Reducer
from tasks.errors import Diverged
from tasks.model.precision import choose_precision
from tasks.train.loop import LoopSettings, train_one_epoch
from tasks.train.progress import RunningEpoch
from tasks.train.step import StepSettings
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import CPU, NUM_CLASSES, TensorLoader, separable, steps_of

HUGE = 2.0**126
"""A scale with which gradients overflow, as float16 does with a smaller one."""


def train(
    scale: float | None, *, model: nn.Module | None = None, epochs: int = 1, max_norm: float | None = None, factor=1.0
):
    """Train a linear model; return its weights, the scaler, and the sums of the last epoch."""
    torch.manual_seed(1)
    model = model or nn.Linear(4, NUM_CLASSES)
    inputs, labels = separable(30)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    loop = LoopSettings(
        *(lambda _step: 0.1, CPU, Reducer(), 9, "val_accuracy", NUM_CLASSES),
        scaler=scaler,
        step=StepSettings(max_gradient_norm=max_norm, accumulate_steps=2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for epoch in range(epochs):
        running = RunningEpoch()
        train_one_epoch(
            model, TensorLoader(factor * inputs.float(), labels, steps_of(30, 2)), optimizer, loop, epoch, running
        )
    return model.state_dict(), scaler, running


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_scale_changes_no_bit(max_norm: float | None) -> None:
    """A power of two is exact in float32; norms are clipped and reported as without it."""
    (plain, _, sums), (scaled, _, same) = (train(scale, max_norm=max_norm) for scale in (None, 2.0**16))

    assert all(torch.equal(plain[name], scaled[name]) for name in plain)
    assert sums.gradient_norms == same.gradient_norms


def test_steps_that_overflow_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The scale is halved until gradients are finite, without an error, and the steps after that train."""
    caplog.set_level("INFO", logger="lakevision.train")
    torch.manual_seed(1)
    before = nn.Linear(4, NUM_CLASSES).state_dict()
    weights, scaler, running = train(HUGE, epochs=2, factor=100.0)

    assert scaler.get_scale() < HUGE
    assert not torch.equal(weights["weight"], before["weight"])
    assert running.gradient_norms.isfinite()
    assert "float16 overflowed" in caplog.text


def test_gradients_that_no_scale_makes_finite_are_an_error() -> None:
    """After as many halvings as lead from the first scale to 1, the layer is named."""
    model = nn.Linear(4, NUM_CLASSES)
    with torch.no_grad():
        model.bias[0] = -float("inf")

    with pytest.raises(Diverged, match=r"epoch 0, step 3 is inf.*train.precision to fp32"):
        train(4.0, model=model, epochs=2)


def test_ranks_leave_out_the_same_steps() -> None:
    """A rank whose own gradients are finite sees the overflow of another one in the average."""
    inputs, labels = separable(12)
    inputs[7] *= 1e30
    initial = nn.Linear(4, NUM_CLASSES)

    def rank_main(reducer: ThreadReducer) -> tuple[torch.Tensor, float]:
        model = deepcopy(initial)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        loop = LoopSettings(lambda _step: 0.1, CPU, reducer, 9, "val_accuracy", NUM_CLASSES, scaler=scaler)
        own = [[0, 1], [2, 3], [4, 5]] if reducer.rank == 0 else [[6, 7], [8, 9], [10, 11]]
        loader = TensorLoader(inputs.float(), labels, own, [4, 4, 4])
        train_one_epoch(model, loader, torch.optim.SGD(model.parameters()), loop, 0)
        return model.weight.detach(), scaler.get_scale()

    (weights, scale), (same, other) = ThreadRanks(2).run(rank_main)
    assert torch.equal(weights, same)
    assert scale == other < 2.0**40
    assert weights.isfinite().all()


def test_float16_is_chosen_only_where_it_is_asked_for_on_a_cpu() -> None:
    """Auto takes it on GPUs without units for bfloat16."""
    assert choose_precision("fp16", CPU, 224) is torch.float16
    assert choose_precision("auto", CPU, 224) is not torch.float16


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float16), ((6, 1), None), ((8, 0), torch.bfloat16)]
)
def test_precision_of_a_gpu_follows_from_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype | None
) -> None:
    """T4 and V100 have 7.5 and 7.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert choose_precision("auto", torch.device("cuda"), 224) is expected
