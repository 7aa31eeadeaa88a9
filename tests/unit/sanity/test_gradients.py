"""Every trained parameter gets a gradient, or is named."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tasks.config import GradientConfig, TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, GradientReport, ParameterGradient
from tasks.sanity import first_batches
from tasks.sanity.gradients import check_gradients, measure_gradients, not_finite, without_gradient
from tasks.train.model import Classifier, build_classifier

TRAIN = TrainConfig(model="mobilenet_v3_small", weights="none", freeze_backbone=False, batch_size=4, seed=1)


def test_all_of_a_network_learns(make_cache: Callable[..., CacheRef]) -> None:
    """Each parameter is in the report once."""
    cache = make_cache({"train": 9, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(TRAIN, cache, GradientConfig())

    check_gradients(report)
    assert report.batches == 2
    assert all(found.norm and found.norm > 0 for found in report.parameters)
    assert len({found.name for found in report.parameters}) == len(report.parameters) > 100


def test_what_the_loss_does_not_depend_on_is_named(
    make_cache: Callable[..., CacheRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that no picture goes through is trained by nobody."""

    def with_more_layers(*given: Any, **named: Any) -> Classifier:
        classifier = build_classifier(*given, **named)
        classifier.network.unused = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
        return classifier

    monkeypatch.setattr(first_batches, "build_classifier", with_more_layers)
    cache = make_cache({"train": 4, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(TRAIN, cache, GradientConfig(num_batches=1))

    names = without_gradient(report.parameters)
    assert names == [f"network.unused.{layer}.{kind}" for layer in range(5) for kind in ("weight", "bias")]
    with pytest.raises(WrongInput, match=r"10 of \d+ trained parameters got no gradient .*unused.0.* and 2 more\)"):
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
