"""One batch learnt by heart, or not."""

import math
from collections.abc import Callable

import pytest

from tasks.config.sanity import OverfitConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, OverfitReport
from tasks.sanity.overfit import check_overfitted, overfit_batch

TRAIN = TrainConfig(
    model="mobilenet_v3_small", weights="none", freeze_backbone=False, batch_size=4, learning_rate=0.003, seed=1
)


def test_a_model_learns_noise_by_heart(make_cache: Callable[..., CacheRef]) -> None:
    """It stops as soon as the loss has fallen far enough, and gives the same curve each time."""
    cache = make_cache({"train": 9, "val": 3, "test": 3}, image_size=32)
    overfit = OverfitConfig(max_steps=60, target_loss_ratio=0.2)

    report = overfit_batch(TRAIN, cache, overfit)

    check_overfitted(report, TRAIN, overfit)
    assert report.num_images == 4
    assert len(report.losses) < 61
    assert report.losses[-1] < 0.2 * report.losses[0] <= min(report.losses[:-1])
    assert overfit_batch(TRAIN, cache, overfit) == report


def test_a_model_that_does_not_learn_is_refused(make_cache: Callable[..., CacheRef]) -> None:
    """With how far the loss fell, and what may be wrong."""
    cache = make_cache({"train": 5, "val": 3, "test": 3}, image_size=32)
    lame = TRAIN.model_copy(update={"learning_rate": 1e-9, "optimizer": "sgd", "batch_size": 1})
    overfit = OverfitConfig(max_steps=2)

    report = overfit_batch(lame, cache, overfit)

    assert len(report.losses) == 3
    with pytest.raises(WrongInput, match=r"the loss of one batch of 1 images went from .* in 2 steps and not below 0"):
        check_overfitted(report, lame, overfit)


def test_a_loss_that_is_no_number_is_no_success() -> None:
    """NaN is not below anything."""
    with pytest.raises(WrongInput, match="went from 1.0000 to nan in 1 steps"):
        check_overfitted(OverfitReport(losses=[1.0, math.nan], num_images=1), TRAIN, OverfitConfig())
