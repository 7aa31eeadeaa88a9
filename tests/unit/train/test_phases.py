"""What a phase of a training is made of: its model, its batches, its optimizer, and what is refused before it."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.collectives import SingleProcess
from tasks.config.train import AugmentationConfig, FineTunePhase
from tasks.errors import WrongInput
from tasks.refs import CacheRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.train.loop import train_one_epoch
from tasks.train.phases import phases_of, prepare_phase
from tasks.train.step import StepSettings
from tests.builders.finished_training import history_of
from tests.builders.phases import begun, context_of, labelled_cache, prepare
from tests.fakes.tiny_training import loop_of

ROWS = {TRAIN: 45, VAL: 9, TEST: 9}

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """A cache of noise of 32x32 pixels, each class alike."""
    return make_cache(ROWS, image_size=32)


def test_a_batch_larger_than_the_split_is_refused_with_what_is_possible(cache: CacheRef) -> None:
    """In one sentence with both numbers; all images in a step are allowed."""
    with pytest.raises(
        WrongInput, match=r"^train.batch_size is 46, but the split 'train' has 45 images, .*: give at most 45, or 4 for"
    ) as refused:
        context_of(cache, batch_size=46).check()
    assert "\n" not in str(refused.value)

    context_of(cache, batch_size=45).check()
    context_of(cache, batch_size="auto").check()


def test_ranks_together_take_no_more_than_there_is(cache: CacheRef) -> None:
    """A step is a batch on each rank; and each rank has an image."""

    class Many(SingleProcess):
        def __init__(self, num_ranks: int) -> None:
            self.num_ranks = num_ranks

    with pytest.raises(WrongInput, match=r"^train.batch_size is 16 on each of 3 ranks, .* most 15, or 1 for 10 steps"):
        replace(context_of(cache, batch_size=16), reducer=Many(3)).check()
    replace(context_of(cache, batch_size=15), reducer=Many(3)).check()
    with pytest.raises(WrongInput, match=r"^distributed.num_ranks is 46, .* give at most 45$"):
        replace(context_of(cache, batch_size=1), reducer=Many(46)).check()


def test_a_class_that_is_never_trained_on_is_named(tmp_path: Path, messages_of: Callable[[str], list[str]]) -> None:
    """With the split that has images of it; one that is in no other split is not."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 6, val=[0, 2, 1], test=[0, 0, 0])
    context_of(cache).check()

    assert messages_of("lakevision.train") == [
        "no image of bee, cat is in the split 'train', so those in 'val' cannot be recognised: add some"
    ]


def test_classes_that_are_all_trained_on_are_no_news(cache: CacheRef, messages_of: Callable[[str], list[str]]) -> None:
    """Nothing is said."""
    context_of(cache).check()
    assert not messages_of("lakevision.train")


def test_a_class_counts_by_how_rare_it_is(tmp_path: Path) -> None:
    """By n / (K n_k) over the classes that are there, the mean over images is 1; one without any counts 0."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 5 + [1], val=[0, 1, 2], test=[0])

    weights = context_of(cache, class_weights="balanced").class_weights()

    assert weights is not None
    assert weights.tolist() == pytest.approx([6 / (2 * 5), 6 / (2 * 1), 0.0])
    assert context_of(cache, class_weights="none").class_weights() is None


@pytest.mark.parametrize("feature_cache", [True, False])
def test_a_class_of_one_image_trains(tmp_path: Path, *, feature_cache: bool) -> None:
    """Its weight is a number, and so is all that an epoch makes of it, on features and on images."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 7 + [1] * 5 + [2], val=[0, 1, 2], test=[0])
    made = prepare(context_of(cache, class_weights="balanced", feature_cache=feature_cache))
    before = nn.utils.parameters_to_vector(made.model.parameters()).detach().clone()

    trained = train_one_epoch(
        made.model, made.loaders[TRAIN], made.optimizer, loop_of(made.learning_rate, step=made.settings), 0
    )

    assert made.settings.class_weights_K is not None
    assert made.settings.class_weights_K.tolist() == pytest.approx([13 / 21, 13 / 15, 13 / 3])
    after = nn.utils.parameters_to_vector(made.model.parameters())
    assert 0.0 < trained.loss < float("inf")
    assert bool(after.isfinite().all())
    assert not torch.equal(after, before)


def test_the_head_of_a_frozen_backbone_is_trained_on_features(cache: CacheRef) -> None:
    """Where nothing says otherwise: the model is the head alone, a batch is what the backbone gave."""
    context = context_of(cache)
    made = prepare(context)

    assert made.model is context.classifier.head
    assert {split: next(iter(loader.epoch(0))).inputs.shape for split, loader in made.loaders.items()} == {
        TRAIN: (6, 1024),
        VAL: (6, 1024),
    }
    assert made.settings.augment is None


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
def test_the_whole_network_is_trained_on_images(cache: CacheRef, settings: dict[str, object]) -> None:
    """Asked for, or because features would be other ones in each epoch; none are made."""
    context = context_of(cache, **settings)
    made = prepare(context)

    assert made.model is context.classifier
    for loader in made.loaders.values():
        batch = next(iter(loader.epoch(0)))
        assert (batch.inputs.dtype, batch.inputs.shape) == (torch.uint8, (6, 32, 32, 3))
    assert not Path(context.spec.storage.cache).exists()
    assert (made.settings.augment is not None) == ("augmentation" in settings)


def test_a_stage_that_unfreezes_trains_the_named_layers_on_images(cache: CacheRef) -> None:
    """After an epoch they have moved and none before them; there batch norm takes no statistics."""
    phase = FineTunePhase(unfreeze_from="conv5", learning_rate=0.01, max_epochs=2)
    context = context_of(cache, fine_tune=[phase])
    network = context.classifier.network
    before = {name: value.clone() for name, value in network.state_dict().items()}

    made = prepare(context, 1)
    assert made.model is context.classifier
    train_one_epoch(made.model, made.loaders[TRAIN], made.optimizer, loop_of(made.learning_rate, step=made.settings), 0)

    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith(("conv5.", "fc."))}
    norms = {name: module for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert {name for name, norm in norms.items() if norm.training} == {"conv5.1"}
    assert len(norms) > 1


def test_a_later_stage_has_a_learning_rate_of_its_own_from_its_first_epoch(cache: CacheRef) -> None:
    """Epochs count over all phases, its schedule begins with it and ends with it."""
    phase = FineTunePhase(unfreeze_from="conv5", learning_rate=0.01, max_epochs=2)
    made = prepare(context_of(cache, fine_tune=[phase], learning_rate=0.5), 1, first_epoch=3)
    steps = made.loaders[TRAIN].num_steps

    rates = [made.learning_rate(step) for step in range(3 * steps, 5 * steps)]
    assert rates[0] == pytest.approx(0.01, rel=0.01)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.001


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_the_optimizer_is_fused_and_has_what_learns(cache: CacheRef, name: str, kind: type) -> None:
    """With the phase's rate and the decay that was asked for."""
    context = context_of(cache, optimizer=name, learning_rate=0.25, weight_decay=0.125, feature_cache=False)
    (group,) = prepare(context).optimizer.param_groups

    assert type(prepare(context).optimizer) is kind
    assert (group["fused"], group["lr"], group["weight_decay"]) == (True, 0.25, 0.125)
    assert [id(one) for one in group["params"]] == [id(one) for one in context.classifier.head.parameters()]


def test_a_batch_size_is_chosen_once(cache: CacheRef) -> None:
    """It is in the progress, so in the checkpoint: a process with more memory goes on with the same steps."""
    progress = begun()
    context = context_of(cache, batch_size="auto")
    made = prepare_phase(context, phases_of(context.spec.train)[0], progress)
    # The largest power of two of which 20 steps make an epoch of 45 images.
    assert progress.batch_size == 2
    assert len(next(iter(made.loaders[TRAIN].epoch(0))).labels_B) == 2

    progress.batch_size = 5
    resumed = prepare_phase(context, phases_of(context.spec.train)[0], progress)
    assert progress.batch_size == 5
    assert len(next(iter(resumed.loaders[TRAIN].epoch(0))).labels_B) == 5


def test_all_that_is_chosen_of_a_step_reaches_it(tmp_path: Path) -> None:
    """No setting of a step is left at what it is where nobody asks for it."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 7 + [1] * 5 + [2], val=[0, 1, 2], test=[0])
    chosen = prepare(
        context_of(
            cache,
            label_smoothing=0.125,
            max_gradient_norm=0.5,
            class_weights="balanced",
            augmentation=AugmentationConfig(flip=True),
            seed=7,
        )
    ).settings

    assert chosen.class_weights_K is not None
    assert chosen.augment is not None
    assert (chosen.label_smoothing, chosen.max_gradient_norm, chosen.seed) == (0.125, 0.5, 7)
    assert chosen.class_weights_K.tolist() == pytest.approx([13 / 21, 13 / 15, 13 / 3])
    # Also a setting that is added one day.
    for field in fields(StepSettings):
        assert getattr(chosen, field.name) is not field.default, field.name


def test_a_later_stage_waits_on_a_plateau_for_what_earlier_ones_reached(cache: CacheRef) -> None:
    """As early stopping does: the rate falls before patience is used up, and counts from the phase's first epoch."""
    phase = FineTunePhase(unfreeze_from="conv5", learning_rate=0.01, max_epochs=5)
    context = context_of(cache, fine_tune=[phase], schedule="plateau", plateau_epochs=2, patience=3)
    reached = [0.9, 0.8, 0.5, 0.6, 0.95]
    history = [
        replace(metrics, val_accuracy=accuracy) for metrics, accuracy in zip(history_of(5), reached, strict=True)
    ]

    rates = []
    for seen in range(2, 6):
        made = prepare(context, 1, first_epoch=2, history=history[:seen])
        rates.append(made.learning_rate(seen * made.loaders[TRAIN].num_steps))

    # Two epochs of the phase below 0.9, the best of the phase before; then one above it.
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
