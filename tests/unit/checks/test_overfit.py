"""The overfit check on one batch."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.checks.sanity import check_overfitted, overfit_batch
from tasks.config.checks import OverfitConfig
from tasks.config.train import TrainConfig
from tasks.errors import TimeLimitExceeded, WrongInput
from tasks.refs import CacheRef, OverfitReport
from tasks.system.slots import take_gpus, take_slot

TRAIN = TrainConfig(
    model="mobilenet_v3_small", weights="none", freeze_backbone=False, batch_size=4, learning_rate=0.003, seed=1
)


def test_model_overfits_a_batch_of_noise(make_cache: Callable[..., CacheRef]) -> None:
    """Training stops as soon as the loss reaches the target, and the loss curve is reproducible."""
    cache = make_cache({"train": 9, "val": 3, "test": 3}, image_size=32)
    overfit = OverfitConfig(max_steps=60, target_loss_ratio=0.2)

    report = overfit_batch(TRAIN, cache, overfit)

    check_overfitted(report, TRAIN, overfit)
    assert report.num_images == 4
    assert len(report.losses) < 61
    assert report.losses[-1] < 0.2 * report.losses[0] <= min(report.losses[:-1])
    assert overfit_batch(TRAIN, cache, overfit) == report


def test_model_that_does_not_learn_raises_an_error(make_cache: Callable[..., CacheRef]) -> None:
    """The error has the first and the last loss."""
    cache = make_cache({"train": 5, "val": 3, "test": 3}, image_size=32)
    too_slow = TRAIN.model_copy(update={"learning_rate": 1e-9, "optimizer": "sgd", "batch_size": 1})
    overfit = OverfitConfig(max_steps=2)

    report = overfit_batch(too_slow, cache, overfit)

    assert len(report.losses) == 3
    with pytest.raises(WrongInput, match=r"1 images went from .* in 2 steps, not below 0"):
        check_overfitted(report, too_slow, overfit)


def test_check_waits_for_a_gpu_of_ranks(
    make_cache: Callable[..., CacheRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that belongs to ranks is not used; one of a single process has a second slot."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    monkeypatch.setattr("tasks.system.slots.tempfile.gettempdir", lambda: str(tmp_path))
    cache, overfit = make_cache({"train": 5, "val": 3, "test": 3}, image_size=32), OverfitConfig(max_steps=1)
    soon = TRAIN.model_copy(update={"timeout_seconds": 1})
    with take_gpus(["GPU-a"], 1, 0.1), pytest.raises(TimeLimitExceeded, match="have used its GPUs for 1 s"):
        overfit_batch(soon, cache, overfit)
    with take_slot(["GPU-a"]):
        assert len(overfit_batch(soon, cache, overfit).losses) == 2


def test_nan_loss_fails_the_check() -> None:
    """NaN is not below the target."""
    with pytest.raises(WrongInput, match="went from 1.0000 to nan in 1 steps"):
        check_overfitted(OverfitReport(losses=[1.0, math.nan], num_images=1), TRAIN, OverfitConfig())
