"""The gradient check: trained parameters without a finite gradient are listed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from tasks.checks import sanity as checks
from tasks.checks.sanity import check_gradients, measure_gradients, not_finite, without_gradient
from tasks.config.checks import GradientConfig
from tasks.config.recipe import phases_of
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.errors import WrongInput
from tasks.model.training_network import Classifier, build_classifier
from tasks.refs import CacheRef, GradientReport, ParameterGradient

TRAIN = TrainConfig(model="mobilenet_v3_small", weights="none", freeze_backbone=False, batch_size=4, seed=1)


def test_every_parameter_of_a_network_gets_a_gradient(make_cache: Callable[..., CacheRef]) -> None:
    """Each trained parameter is in the report once, with a non-zero norm."""
    cache = make_cache({"train": 9, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(TRAIN, cache, GradientConfig())

    check_gradients(report)
    assert report.batches == 2
    assert all(found.norm and found.norm > 0 for found in report.parameters)
    assert len({found.name for found in report.parameters}) == len(report.parameters) > 100


def test_layers_of_the_last_phase_are_checked(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """The report has all layers that `train.fine_tune` unfreezes, and no layer that stays frozen."""
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model("mobilenet_v3_small", weights=None).state_dict(), weights)
    phases = [
        FineTunePhase(unfreeze_from=layer, learning_rate=rate)
        for layer, rate in (("features.12", 1e-3), ("features.11", 2e-4))
    ]
    train = TRAIN.model_copy(update={"weights": str(weights), "freeze_backbone": True, "fine_tune": phases})
    cache = make_cache({"train": 9, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(train, cache, GradientConfig())

    check_gradients(report)
    parts = {found.name.removeprefix("network.").rpartition(".")[0] for found in report.parameters}
    assert {".".join(part.split(".")[:2]) for part in parts} == {
        "features.11",
        "features.12",
        "classifier.0",
        "classifier.3",
    }
    with checks.first_batches(train, phases_of(train)[-1], cache, 1) as built:
        assert built.optimizer.param_groups[0]["lr"] == 2e-4
    with checks.first_batches(train, phases_of(train)[0], cache, 1) as head:
        assert [name for name, value in head.classifier.named_parameters() if value.requires_grad] == [
            "network.classifier.3.weight",
            "network.classifier.3.bias",
        ]


def test_precision_is_that_of_training(make_cache: Callable[..., CacheRef], monkeypatch: pytest.MonkeyPatch) -> None:
    """Image size and device decide the precision: a gradient may be finite in float32 and not in bfloat16."""
    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: True)
    precisions = []
    for image_size, wanted in ((128, "auto"), (128, "fp32"), (32, "auto")):
        cache = make_cache({"train": 4, "val": 3, "test": 3}, image_size=image_size, folder=f"{image_size}-{wanted}")
        train = TRAIN.model_copy(update={"precision": wanted, "device": "cpu"})
        with checks.first_batches(train, phases_of(train)[0], cache, 1) as built:
            precisions.append(built.classifier.precision)
    assert precisions == [torch.bfloat16, None, None]


def test_parameters_that_do_not_affect_the_loss_are_in_the_error(
    make_cache: Callable[..., CacheRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unused layer gets no gradient, and the error lists its parameters."""

    def with_more_layers(*given: Any, **named: Any) -> Classifier:
        classifier = build_classifier(*given, **named)
        classifier.network.unused = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
        return classifier

    monkeypatch.setattr(checks, "build_classifier", with_more_layers)
    cache = make_cache({"train": 4, "val": 3, "test": 3}, image_size=32)

    report = measure_gradients(TRAIN, cache, GradientConfig(num_batches=1))

    names = without_gradient(report.parameters)
    assert names == [f"network.unused.{layer}.{kind}" for layer in range(5) for kind in ("weight", "bias")]
    with pytest.raises(WrongInput, match=r"10 of \d+ trained .*unused.0.* and 2 more\)"):
        check_gradients(report)


def test_zero_and_non_finite_gradients_are_reported_separately() -> None:
    """Non-finite gradients are reported first, since they invalidate all others."""
    parameters = [
        ParameterGradient(name="good", elements=1, norm=0.5, finite=True),
        ParameterGradient(name="zero", elements=1, norm=0.0, finite=True),
        ParameterGradient(name="missing", elements=1, norm=None, finite=True),
        ParameterGradient(name="nan", elements=1, norm=None, finite=False),
    ]

    assert without_gradient(parameters) == ["zero", "missing"]
    assert not_finite(parameters) == ["nan"]
    with pytest.raises(WrongInput, match=r"1 of 4 parameters are non-finite \(nan\): lower"):
        check_gradients(GradientReport(parameters=parameters, batches=1))
