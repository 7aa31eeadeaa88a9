"""Every trained parameter gets a gradient, or is named."""

from collections.abc import Callable

import pytest

from tasks.config import GradientConfig, TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, GradientReport, ParameterGradient
from tasks.sanity.gradients import check_gradients, measure_gradients, not_finite, without_gradient

TRAIN = TrainConfig(model="mobilenet_v3_small", weights="none", freeze_backbone=False, batch_size=4, seed=1)


def test_all_of_a_network_learns(make_cache: Callable[..., CacheRef]) -> None:
    """Each parameter is in the report once."""
    cache = make_cache({"train": 9, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(TRAIN, cache, GradientConfig())

    check_gradients(report)
    assert report.batches == 2
    assert all(found.norm and found.norm > 0 for found in report.parameters)
    assert len({found.name for found in report.parameters}) == len(report.parameters) > 100


def test_what_the_loss_does_not_depend_on_is_named(make_cache: Callable[..., CacheRef]) -> None:
    """The auxiliary classifiers of googlenet are trained by nobody here."""
    cache = make_cache({"train": 4, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(TRAIN.model_copy(update={"model": "googlenet"}), cache, GradientConfig(num_batches=1))

    names = without_gradient(report.parameters)
    assert {name.split(".")[1] for name in names} == {"aux1", "aux2"}
    with pytest.raises(WrongInput, match=r"14 of \d+ trained parameters got no gradient .*network.aux1.* and 6 more\)"):
        check_gradients(report)


def test_gradients_that_are_zero_or_no_numbers_are_told_apart() -> None:
    """Numbers come first: what is none makes the rest worthless."""
    parameters = [
        ParameterGradient(name="good", elements=1, norm=0.5, finite=True),
        ParameterGradient(name="zero", elements=1, norm=0.0, finite=True),
        ParameterGradient(name="never", elements=1, norm=None, finite=True),
        ParameterGradient(name="nan", elements=1, norm=None, finite=False),
    ]

    assert without_gradient(parameters) == ["zero", "never"]
    assert not_finite(parameters) == ["nan"]
    with pytest.raises(WrongInput, match=r"the gradients of 1 of 4 parameters are no numbers \(nan\): lower"):
        check_gradients(GradientReport(parameters=parameters, batches=1))
