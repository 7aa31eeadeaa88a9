"""Recipes: what they train, with which settings, and which phase wins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer
from tasks.config.augmentation import AugmentationConfig
from tasks.config.recipe import (
    ALL_LAYERS,
    HEAD_WEIGHT_DECAYS,
    MAX_PLANNED_EPOCHS,
    FineTuningPlan,
    phases_of,
    total_epochs,
    values_of,
)
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.metrics.evaluate import CALIBRATED, evaluate
from tasks.model.device import RATE_FRACTION, make_optimizer
from tasks.model.training_network import build_classifier
from tasks.model_package.serving import serving_network
from tasks.refs import TEST, TRAIN, VAL, CacheRef
from tasks.train import plan as planning
from tasks.train.context import TrainingContext
from tasks.train.features import StandardizedHead
from tasks.train.loop import fit
from tasks.train.phases import prepare_phase
from tasks.train.progress import EarlyStopping
from tasks.train.schedule import patient_from
from tests.builders.phases import context_of, labelled_cache, start_progress
from tests.builders.small_network import SMALL
from tests.fakes.tiny_training import CPU, TensorLoader

PLAN = FineTuningPlan(epochs=4, flip=True, reason="because")


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Return a cache of noise of 32x32 pixels, with balanced classes."""
    return make_cache({TRAIN: 45, VAL: 9, TEST: 9}, image_size=32)


@pytest.mark.parametrize(
    ("settings", "trained", "layers"),
    [
        ({}, "head, then all", [None] * 5 + ["all"]),
        ({"recipe": "finetune", "weight_decay": 0.1}, "head, then all", [None, "all"]),
        ({"recipe": "head"}, "head", [None] * 5),
        ({"recipe": "head", "feature_cache": False}, "head", [None]),
        ({"weights": "none"}, "all", [None]),
        ({"recipe": "scratch"}, "all", [None]),
        ({"freeze_backbone": False}, "all", [None]),
        ({"freeze_backbone": True}, "head", [None] * 5),
        ({"fine_tune": [{"unfreeze_from": "layer4"}]}, "head, then all", [None] * 5 + ["layer4"]),
        ({"recipe": "given"}, "head", [None]),
        ({"recipe": "given", "fine_tune": [{"unfreeze_from": "layer4"}]}, "head, then all", [None, "layer4"]),
    ],
)
def test_recipe_decides_the_phases_that_settings_leave_open(
    settings: dict[str, Any], trained: str, layers: list[str | None]
) -> None:
    """The phases are numbered in order, and those before the plan do not need it."""
    train = TrainConfig.model_validate(settings)
    phases = phases_of(train, PLAN)

    assert train.trained == trained
    assert [phase.unfreeze_from for phase in phases] == layers
    assert [phase.number for phase in phases] == list(range(len(layers)))
    assert phases_of(train) == [phase for phase in phases if not phase.whole]
    assert total_epochs(train, PLAN) - total_epochs(train) == (4 if train.plans_fine_tuning else 0)


def test_given_settings_win_over_those_of_the_recipe() -> None:
    """A value that equals the default of earlier releases is a given one, too."""
    *heads, layers = phases_of(TrainConfig(optimizer="adam", label_smoothing=0.0, max_epochs=3), PLAN)

    assert [phase.train.weight_decay for phase in heads] == list(HEAD_WEIGHT_DECAYS)
    assert {phase.train.max_epochs for phase in heads} == {3}
    assert (layers.train.optimizer, layers.train.label_smoothing, layers.train.max_epochs) == ("adam", 0.0, 4)
    assert layers.train.layer_decay == ALL_LAYERS["layer_decay"]
    assert layers.train.augmentation == AugmentationConfig(flip=True, resized_crop=0.7, colour=0.2)
    for augmentation in (AugmentationConfig(by_recipe=False), AugmentationConfig(rand_augment=1)):
        assert phases_of(TrainConfig(augmentation=augmentation), PLAN)[-1].train.augmentation == augmentation
    tuned = phases_of(TrainConfig(fine_tune=[FineTunePhase(unfreeze_from="all", learning_rate=0.5)]))[-1].train
    assert (tuned.learning_rate, tuned.max_epochs, tuned.weight_decay) == (0.5, 5, ALL_LAYERS["weight_decay"])


def test_recipe_given_is_that_of_release_0_1_0() -> None:
    """Runs that recorded no recipe train as they did."""
    values = values_of(TrainConfig(recipe="given"))

    assert (values.optimizer, values.learning_rate, values.schedule, values.monitor) == (
        *("adam", 1e-3, "cosine", "val_accuracy"),
    )
    assert (values.weight_decay, values.label_smoothing, values.ema_decay, values.max_epochs) == (0.0, 0.0, 0.0, 20)
    assert patient_from(values, 2.0) == 2.0


@pytest.mark.parametrize(
    ("schedule", "expected"), [("cosine", 6.0), ("one_cycle", 6.0), ("constant", 2.0), ("plateau", 2.0)]
)
def test_patience_counts_from_the_half_of_a_schedule_that_falls(schedule: str, expected: float) -> None:
    """A cosine is not cut before its rate has fallen."""
    train = TrainConfig.model_validate({"schedule": schedule, "max_epochs": 10})
    assert patient_from(values_of(train), 2.0) == expected


def test_equal_accuracies_are_decided_by_the_loss() -> None:
    """The first one is kept where no loss is given, as in earlier releases."""
    stopping = EarlyStopping(patience=9, min_delta=0.0, higher_is_better=True)
    assert [stopping.update(*epoch) for epoch in ((0, 0.5, 1.0), (1, 0.5, 1.1), (2, 0.5, 0.9), (3, 0.4, 0.1))] == [
        *(True, False, True, False),
    ]
    assert (stopping.best_epoch, stopping.epochs_without_improvement) == (2, 1)
    assert not stopping.update(4, 0.5)


def test_calibrated_loss_does_not_depend_on_the_scale_of_the_logits() -> None:
    """Label smoothing gives small logits: their loss is higher, and that after calibration is the same."""
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    logits = 1.5 * torch.nn.functional.one_hot(labels, 3).double() + torch.randn(60, 3, dtype=torch.float64)

    found = [
        evaluate(torch.nn.Identity(), TensorLoader(factor * logits, labels, [range(60)]), 3, CPU, Reducer())
        for factor in (1.0, CALIBRATED[4])
    ]

    assert found[1].loss > found[0].loss + 0.05
    assert found[1].calibrated_loss == pytest.approx(found[0].calibrated_loss, rel=1e-3)
    assert found[0].calibrated_loss <= found[0].loss


def test_rates_grow_from_the_first_layer_to_the_head_and_norms_do_not_decay() -> None:
    """The groups have every trained parameter once."""
    classifier = build_classifier(SMALL, "none", 3, freeze_backbone=False)
    train = values_of(TrainConfig(), ALL_LAYERS)
    optimizer = make_optimizer(train, classifier)

    groups = {id(value): group for group in optimizer.param_groups for value in group["params"]}
    fractions = [groups[id(value)][RATE_FRACTION] for value in classifier.parameters()]
    assert len(groups) == len(fractions)
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (pytest.approx(train.layer_decay), 1.0)
    for value in classifier.parameters():
        assert groups[id(value)]["weight_decay"] == (train.weight_decay if value.ndim > 1 else 0.0)
    assert isinstance(optimizer, torch.optim.AdamW)
    (alone,) = {group[RATE_FRACTION] for group in make_optimizer(train, torch.nn.Linear(2, 2)).param_groups}
    assert alone == 1.0, "the head alone has the whole rate"


def context_with_weights(cache: CacheRef, **settings: Any) -> TrainingContext:
    """Return a context as with pretrained weights, for which random ones stand."""
    return context_of(cache, recipe="auto", **settings)


def test_head_on_standardized_features_is_the_same_head(cache: CacheRef) -> None:
    """Moved into the standardized space and back, it has the same logits; its inputs have mean 0 and deviation 1."""
    context = context_with_weights(cache)
    before = {name: value.clone() for name, value in context.classifier.head.state_dict().items()}
    trainable = prepare_phase(context, phases_of(context.spec.train)[0], start_progress())
    head = trainable.model
    assert isinstance(head, StandardizedHead)

    batch = next(iter(trainable.loaders[VAL].epoch(0)))
    plain = torch.nn.functional.linear(batch.inputs, before["weight"], before["bias"])
    assert torch.allclose(head(batch.inputs), plain, atol=1e-4)
    inputs: list[torch.Tensor] = []
    handle = head.head.register_forward_pre_hook(lambda _module, given: inputs.append(given[0]))
    for every in trainable.loaders[TRAIN].epoch(0):
        head(every.inputs)
    handle.remove()
    assert torch.cat(inputs).mean(0).abs().max() < 1e-3
    head.fold()
    assert all(
        torch.allclose(before[name], value, atol=1e-4) for name, value in context.classifier.head.named_parameters()
    )


def test_head_is_the_same_on_features_far_from_zero() -> None:
    """Its bias moves with the mean of the features, and back."""
    torch.manual_seed(0)
    head, features = torch.nn.Linear(4, 3), 50 + 3 * torch.randn(20, 4)
    before, plain = {name: value.clone() for name, value in head.state_dict().items()}, head(features)
    standardized = StandardizedHead(head, features.mean(0), features.std(0))
    assert torch.allclose(standardized(features), plain, atol=1e-3)
    standardized.fold()
    assert all(torch.allclose(value, before[name], atol=1e-4) for name, value in head.named_parameters())


def test_dropout_of_the_head_applies_to_cached_features() -> None:
    """The network's own dropout beside it is replaced, and inference has none."""
    classifier = build_classifier("mobilenet_v2", "none", 3, freeze_backbone=True, dropout=0.9)
    features = torch.ones(64, 1280)

    assert [module.p for module in classifier.network.modules() if isinstance(module, torch.nn.Dropout)] == [0.0]
    trained, tested = classifier.train().head(features), classifier.eval().head(features)
    assert trained.std(0).min() > 0
    assert tested.std(0).max() == 0


def test_statistics_of_batch_norm_are_kept_in_fine_tuning_by_the_recipe(cache: CacheRef) -> None:
    """Its weights are trained, on augmented images."""
    context = context_with_weights(cache)
    trainable = prepare_phase(context, phases_of(context.spec.train, PLAN)[-1], start_progress(phase=5))
    before = {name: value.clone() for name, value in context.classifier.state_dict().items()}

    progress = start_progress(phase=5, phases=[(0, "all layers")])
    loop = replace(trainable.loop, max_epochs=1)
    fit(trainable.model, trainable.loaders, trainable.optimizer, loop, progress, lambda _metrics, _progress: None)

    changed = {name for name, value in context.classifier.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name, value in context.classifier.named_parameters() if value.requires_grad}
    assert trainable.loop.step.augment is not None
    assert trainable.loop.patient_from == 4


def test_network_with_dropout_of_the_head_is_served_as_without() -> None:
    """The serving form, a trace of the network, drops nothing."""
    torch.manual_seed(0)
    classifier = build_classifier("mobilenet_v2", "none", 3, freeze_backbone=False, dropout=0.5).eval()
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)

    served = serving_network(classifier, "float32", temperature=1)

    assert torch.allclose(served(images), classifier(images), atol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "seconds", "epoch", "epochs"),
    [("auto", 100.0, 30.0, 3), ("auto", 10.0, 30.0, 0), ("auto", -5.0, 30.0, 0), ("finetune", 10.0, 30.0, 1)]
    + [(recipe, float("inf"), 30.0, MAX_PLANNED_EPOCHS) for recipe in ("auto", "finetune")],
)
def test_budget_is_turned_into_epochs(
    cache: CacheRef, monkeypatch: pytest.MonkeyPatch, recipe: str, seconds: float, epoch: float, epochs: int
) -> None:
    """Less than an epoch leaves fine-tuning out, unless it is what was asked for, and the reason has the figures."""
    monkeypatch.setattr(planning, "_epoch_seconds", lambda _context, *, flip: epoch)
    context = context_of(cache, recipe=recipe)

    plan = planning.plan_fine_tuning(context, seconds)

    assert plan.epochs == epochs
    assert "an epoch takes 30.0 s" in plan.reason
    assert ("without a budget" in plan.reason) == (seconds == float("inf"))
    assert plan.reason.startswith("left out" if epochs == 0 else f"{epochs} epochs of all layers")


def test_measured_epoch_leaves_weights_and_statistics(cache: CacheRef) -> None:
    """The time of a step is measured on the network itself, which is the same afterwards, with a frozen backbone."""
    context = context_with_weights(cache)
    before = {name: value.clone() for name, value in context.classifier.state_dict().items()}

    plan = planning.plan_fine_tuning(context, 1e6)

    assert 0 < plan.epochs <= MAX_PLANNED_EPOCHS
    assert all(torch.equal(value, before[name]) for name, value in context.classifier.state_dict().items())
    trained = {name for name, value in context.classifier.named_parameters() if value.requires_grad}
    assert trained == {name for name in before if name.startswith("network.fc.")}
    assert all(value.grad is None for value in context.classifier.parameters())


def test_classes_that_differ_by_their_side_are_not_mirrored(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of an arrow to the left are not to the right: a head that tells them apart shows it on `val`."""
    cache = labelled_cache(tmp_path / "sides", train=[0, 1] * 20, val=[0, 1] * 20, test=[0, 1])
    context = context_of(cache, recipe="auto")

    class Sided(torch.nn.Module):
        """Tells images by the side of their brighter half."""

        def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
            values = images_BHWC.float().mean(dim=(1, 3))
            left, right = values[:, :16].mean(1), values[:, 16:].mean(1)
            return torch.stack([left - right, right - left, torch.full_like(left, -1e3)], dim=1)

    sided = Sided()
    batches = list(context.images(VAL, 64).epoch(0))
    labels = sided(batches[0].inputs).argmax(1)
    own = labelled_cache(tmp_path / "own", train=[0, 1], val=labels.tolist(), test=[0, 1])
    told = replace(context_of(own, recipe="auto"), classifier=sided)  # type: ignore[arg-type]  # a stand-in for the network
    assert not planning._may_mirror(told)[0]

    class Same(Sided):
        """Tells images by their brightness."""

        def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
            value = images_BHWC.float().mean(dim=(1, 2, 3)) - 127
            return torch.stack([value, -value, torch.full_like(value, -1e3)], dim=1)

    assert planning._may_mirror(replace(told, classifier=Same()))[0]  # type: ignore[arg-type]  # as above
    assert open_cache(own).splits[VAL].rows == 40
