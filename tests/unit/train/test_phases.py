"""Model, batches, optimizer and settings of a phase, and the checks before it."""

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks.collectives.reducer import Reducer
from tasks.config.augmentation import AugmentationConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.recipe import phases_of, values_of
from tasks.config.train import FineTunePhase
from tasks.errors import WrongInput
from tasks.refs import TEST, TRAIN, VAL, CacheRef
from tasks.train.loop import train_one_epoch
from tasks.train.phases import prepare_phase
from tasks.train.step import StepSettings
from tests.builders.finished_training import history_of
from tests.builders.phases import context_of, labelled_cache, prepare, start_progress
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import loop_of

ROWS = {TRAIN: 45, VAL: 9, TEST: 9}


class Many(Reducer):
    """Rank 0 of several."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Return a cache of noise of 32x32 pixels, with balanced classes."""
    return make_cache(ROWS, image_size=32)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "expected"),
    [
        ({"batch_size": 46}, 1, 45),
        ({"batch_size": 45}, 1, 45),
        ({"batch_size": 16, "accumulate_steps": 3}, 1, 15),
        ({"batch_size": 16}, 3, 15),
        ({"batch_size": 15}, 3, 15),
        ({"batch_size": 32}, 45, 1),
    ],
)
def test_batch_larger_than_the_split_is_lowered_and_the_log_says_so(
    cache: CacheRef,
    messages_of: Callable[[str], list[str]],
    settings: dict[str, Any],
    num_ranks: int,
    expected: int,
) -> None:
    """The batches of all ranks, and of all parts of a step, together take at most the images of the split."""
    context = replace(context_of(cache, **settings), reducer=Many(num_ranks))
    context.check()

    assert context.batch_size(context.classifier, values_of(context.spec.train)) == expected
    line = f"train.batch_size is {settings['batch_size']}, lowered to {expected}: the split 'train' has 45 images"
    assert (line in messages_of("lakevision.train")) == (expected < settings["batch_size"])


def test_batches_are_pinned_for_a_gpu_only(cache: CacheRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on the CPU of a machine with a GPU needs no page-locked memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    context = context_of(cache)
    assert not context.images(TRAIN, 4)._memory.pin
    assert replace(context, device=torch.device("cuda")).images(TRAIN, 4)._memory.pin


def test_ranks_compute_in_the_precision_that_all_have(
    make_cache: Callable[..., CacheRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without bfloat16 on one host makes all ranks compute in float32."""
    cache = make_cache({TRAIN: 3, VAL: 3, TEST: 3}, image_size=128)
    has_bf16 = {"cpu": True, "meta": False}
    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: has_bf16[device.type])

    def precisions(devices: tuple[str, str]) -> list[torch.dtype | None]:
        def rank_main(reducer: ThreadReducer) -> torch.dtype | None:
            device = torch.device(devices[reducer.rank])
            own = replace(context_of(cache, precision="auto"), device=device, reducer=reducer)
            own.agree_on_precision()
            return own.precision

        return ThreadRanks(2).run(rank_main)

    assert precisions(("cpu", "cpu")) == [torch.bfloat16] * 2
    assert precisions(("cpu", "meta")) == [None] * 2


@pytest.mark.parametrize(
    ("num_ranks", "settings", "copies"),
    [(1, {}, 2), (2, {}, 3), (2, {"accumulate_steps": 2}, 4), (1, {"accumulate_steps": 2, "ema_decay": 0.9}, 4)],
)
def test_automatic_batch_size_counts_buckets_and_kept_gradients(
    cache: CacheRef, monkeypatch: pytest.MonkeyPatch, num_ranks: int, settings: dict[str, Any], copies: int
) -> None:
    """Each takes as much memory as the trained weights, as do the two moments of Adam and the moving average."""
    found = []
    monkeypatch.setattr("tasks.train.context.largest_batch", lambda *_args, **named: found.append(named["copies"]) or 1)

    def rank_main(reducer: ThreadReducer) -> int:
        context = replace(context_of(cache, batch_size="auto", **settings), reducer=reducer)
        return context.batch_size(context.classifier, values_of(context.spec.train))

    assert ThreadRanks(num_ranks).run(rank_main) == [1] * num_ranks
    assert set(found) == {copies}


def test_more_parts_of_a_step_than_images_are_rejected(cache: CacheRef) -> None:
    """Each part takes a batch of at least one image."""
    with pytest.raises(WrongInput, match=r"accumulate_steps is 46.* give at most 45$"):
        context_of(cache, batch_size="auto", accumulate_steps=46).check()
    context_of(cache, batch_size="auto", accumulate_steps=45).check()


def test_more_ranks_than_images_are_rejected(cache: CacheRef) -> None:
    """Each rank needs an image."""
    with pytest.raises(WrongInput, match=r"^distributed.num_ranks is 46, .* give at most 45$"):
        replace(context_of(cache, batch_size=1), reducer=Many(46)).check()


def test_class_without_training_images_is_logged(tmp_path: Path, messages_of: Callable[[str], list[str]]) -> None:
    """The warning names each class that has images only in another split, and that split."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 6, val=[0, 2, 1], test=[0, 0, 0])
    context_of(cache).check()

    assert messages_of("lakevision.train") == [
        "the split 'train' has no image of bee, cat, so those in 'val' cannot be recognised: add some"
    ]


def test_no_warning_if_all_classes_have_training_images(
    cache: CacheRef, messages_of: Callable[[str], list[str]]
) -> None:
    """Nothing is logged if each class has training images."""
    context_of(cache).check()
    assert not messages_of("lakevision.train")


def test_balanced_class_weights_are_inverse_frequencies(tmp_path: Path) -> None:
    """The weights are n / (K n_k) over the classes with images, and 0 for a class without any."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 5 + [1], val=[0, 1, 2], test=[0])

    weights = context_of(cache, class_weights="balanced").class_weights()

    assert weights is not None
    assert weights.tolist() == pytest.approx([6 / (2 * 5), 6 / (2 * 1), 0.0])
    assert context_of(cache, class_weights="none").class_weights() is None


@pytest.mark.parametrize("feature_cache", [True, False])
def test_class_with_one_image_is_trained_on(tmp_path: Path, *, feature_cache: bool) -> None:
    """Class weights, loss and weights stay finite after an epoch, on features and on images."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 7 + [1] * 5 + [2], val=[0, 1, 2], test=[0])
    made = prepare(context_of(cache, class_weights="balanced", feature_cache=feature_cache))
    before = nn.utils.parameters_to_vector(made.model.parameters()).detach().clone()

    trained = train_one_epoch(
        made.model, made.loaders[TRAIN], made.optimizer, loop_of(made.loop.schedule, step=made.loop.step), 0
    )

    assert made.loop.step.class_weights_K is not None
    assert made.loop.step.class_weights_K.tolist() == pytest.approx([13 / 21, 13 / 15, 13 / 3])
    after = nn.utils.parameters_to_vector(made.model.parameters())
    assert 0.0 < trained.train_loss < float("inf")
    assert bool(after.isfinite().all())
    assert not torch.equal(after, before)


def test_head_of_a_frozen_backbone_is_trained_on_features(cache: CacheRef) -> None:
    """By default the model is only the head, and a batch has features of the backbone."""
    context = context_of(cache)
    made = prepare(context)

    assert made.model is context.classifier.head
    assert {split: next(iter(loader.epoch(0))).inputs.shape for split, loader in made.loaders.items()} == {
        TRAIN: (6, 1024),
        VAL: (6, 1024),
    }
    assert made.loop.step.augment is None


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_cache": False},
        {"freeze_backbone": False},
        {"augmentation": AugmentationConfig(flip=True)},
        {"augmentation": AugmentationConfig(resized_crop=0.5)},
        {"augmentation": AugmentationConfig(rand_augment=2)},
        {"augmentation": AugmentationConfig(mixup=0.2)},
        {"augmentation": AugmentationConfig(cutmix=1.0)},
    ],
    ids=["no-feature-cache", "not-frozen", "flip", "crop", "rand-augment", "mixup", "cutmix"],
)
def test_whole_network_is_trained_on_images(cache: CacheRef, settings: dict[str, object]) -> None:
    """No features are cached if the settings exclude them, or if they would differ per epoch."""
    context = context_of(cache, **settings)
    made = prepare(context)

    assert made.model is context.classifier
    for loader in made.loaders.values():
        batch = next(iter(loader.epoch(0)))
        assert (batch.inputs.dtype, batch.inputs.shape) == (torch.uint8, (6, 32, 32, 3))
    assert not Path(context.spec.storage.cache).exists()
    assert (made.loop.step.augment is not None) == ("augmentation" in settings)


def test_fine_tuning_phase_trains_the_layers_from_the_named_one(cache: CacheRef) -> None:
    """Only those layers change in an epoch, and batch norm before them stays in evaluation mode."""
    phase = FineTunePhase(unfreeze_from="conv5", learning_rate=0.01, max_epochs=2)
    context = context_of(cache, fine_tune=[phase])
    network = context.classifier.network
    before = {name: value.clone() for name, value in network.state_dict().items()}

    made = prepare(context, 1)
    assert made.model is context.classifier
    train_one_epoch(
        made.model, made.loaders[TRAIN], made.optimizer, loop_of(made.loop.schedule, step=made.loop.step), 0
    )

    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith(("conv5.", "fc."))}
    norms = {name: module for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert {name for name, norm in norms.items() if norm.training} == {"conv5.1"}
    assert len(norms) > 1


def test_later_phase_has_its_own_learning_rate_and_schedule(cache: CacheRef) -> None:
    """Although epochs count over all phases, the schedule starts and ends with the phase."""
    phase = FineTunePhase(unfreeze_from="conv5", learning_rate=0.01, max_epochs=2)
    made = prepare(context_of(cache, fine_tune=[phase], learning_rate=0.5), 1, first_epoch=3)
    steps = made.loaders[TRAIN].num_steps

    rates = [made.loop.schedule(step) for step in range(3 * steps, 5 * steps)]
    assert rates[0] == pytest.approx(0.01, rel=0.01)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.001


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_optimizer_is_fused_and_has_the_trained_parameters(cache: CacheRef, name: str, kind: type) -> None:
    """The optimizer has the learning rate and weight decay of the settings."""
    context = context_of(cache, optimizer=name, learning_rate=0.25, weight_decay=0.125, feature_cache=False)
    (group,) = prepare(context).optimizer.param_groups

    assert type(prepare(context).optimizer) is kind
    assert (group["fused"], group["lr"], group["weight_decay"]) == (True, 0.25, 0.125)
    assert [id(value) for value in group["params"]] == [id(value) for value in context.classifier.head.parameters()]


def test_rate_and_schedule_are_those_of_the_accumulated_step(cache: CacheRef) -> None:
    """Four batches of 6 images are a step of 24, with twice the rate for 6 and a quarter of the steps."""
    made = prepare(context_of(cache, accumulate_steps=4, schedule="constant", learning_rate=0.01, max_epochs=8))

    assert made.loaders[TRAIN].num_steps == 8
    assert made.loop.patient_from == 2.0
    # Two steps per epoch: the warm-up has four.
    assert [made.loop.schedule(step) for step in range(6)] == pytest.approx([0.01, 0.0125, 0.015, 0.0175, 0.02, 0.02])


def test_batch_size_is_chosen_once(cache: CacheRef) -> None:
    """The chosen size is part of the progress, so that a resumed run keeps it."""
    progress = start_progress()
    context = context_of(cache, batch_size="auto")
    made = prepare_phase(context, phases_of(context.spec.train)[0], progress)
    # The largest power of two with 20 steps per epoch of 45 images.
    assert progress.batch_size == 2
    assert len(next(iter(made.loaders[TRAIN].epoch(0))).labels_B) == 2

    progress.batch_size = 5
    resumed = prepare_phase(context, phases_of(context.spec.train)[0], progress)
    assert progress.batch_size == 5
    assert len(next(iter(resumed.loaders[TRAIN].epoch(0))).labels_B) == 5


def test_ranks_take_the_batch_size_of_the_one_with_the_least_memory(
    tmp_path: Path, make_cache: Callable[..., CacheRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank has no free memory, all ranks have batches of one image."""
    cache = make_cache({TRAIN: 400, VAL: 9, TEST: 9}, image_size=32)
    contexts = [context_of(cache, batch_size="auto") for _rank in range(2)]
    free = [1 << 40, 0]
    monkeypatch.setattr("tasks.model.precision.free_memory", lambda: free[threading.current_thread().name == "poor"])

    def rank_main(reducer: ThreadReducer) -> int:
        threading.current_thread().name = "poor" if reducer.rank == 1 else "rich"
        context = replace(contexts[reducer.rank], reducer=reducer)
        return context.batch_size(context.classifier.head, values_of(context.spec.train))

    assert ThreadRanks(2).run(rank_main) == [1, 1]
    free[1] = 1 << 40
    assert ThreadRanks(2).run(rank_main) == [8, 8]


def test_all_step_settings_are_passed_on(tmp_path: Path) -> None:
    """No field of StepSettings keeps its default when the settings change it."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 7 + [1] * 5 + [2], val=[0, 1, 2], test=[0])
    context = context_of(
        cache,
        label_smoothing=0.125,
        max_gradient_norm=0.5,
        class_weights="balanced",
        augmentation=AugmentationConfig(flip=True),
        seed=7,
        accumulate_steps=2,
    )
    assert not prepare(context).loop.step.sync_batch_norm
    spec = context.spec.model_copy(update={"distributed": DistributedConfig(sync_batch_norm=True)})

    def rank_main(reducer: ThreadReducer) -> StepSettings:
        return prepare(replace(context, spec=spec, reducer=reducer)).loop.step

    chosen, _other = ThreadRanks(2).run(rank_main)

    assert chosen.class_weights_K is not None
    assert chosen.augment is not None
    assert (chosen.label_smoothing, chosen.max_gradient_norm, chosen.seed) == (0.125, 0.5, 7)
    assert chosen.accumulate_steps == 2
    assert chosen.class_weights_K.tolist() == pytest.approx([13 / 21, 13 / 15, 13 / 3])
    # Covers fields that are added later.
    for field in fields(StepSettings):
        assert getattr(chosen, field.name) is not field.default, field.name


def test_plateau_of_a_later_phase_is_relative_to_earlier_phases(cache: CacheRef) -> None:
    """The rate falls after epochs of the phase that do not improve on the best of all phases."""
    phase = FineTunePhase(unfreeze_from="conv5", learning_rate=0.01, max_epochs=5)
    context = context_of(cache, fine_tune=[phase], schedule="plateau", plateau_epochs=2, patience=3)
    accuracies = [0.9, 0.8, 0.5, 0.6, 0.95]
    history = [
        replace(metrics, val_accuracy=accuracy) for metrics, accuracy in zip(history_of(5), accuracies, strict=True)
    ]

    rates = []
    for seen in range(2, 6):
        made = prepare(context, 1, first_epoch=2, history=history[:seen])
        rates.append(made.loop.schedule(seen * made.loaders[TRAIN].num_steps))

    # Two epochs of the phase below 0.9, the best of the phase before; then one above it.
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
