"""What a stage of a training is made of: its model, its batches, its optimizer, and what is refused before it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tasks.cache.manifest import open_cache
from tasks.config import AugmentationConfig, CacheConfig, FineTuneStage, TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.train.early_stopping import EarlyStopping
from tasks.train.loop import train_one_epoch
from tasks.train.model import build_classifier
from tasks.train.progress import Progress
from tasks.train.reduce import SingleProcess
from tasks.train.stages import Setting, Trainable, prepare_stage, stages_of
from tests.caches import write_cache

CPU = torch.device("cpu")
SMALL = "shufflenet_v2_x0_5"
ROWS = {TRAIN: 45, VAL: 9, TEST: 9}

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """A cache of noise of 32x32 pixels, each class alike."""
    return make_cache(ROWS, image_size=32)


def setting_of(cache: CacheRef, **settings: object) -> Setting:
    """Return what a training of one process has before its first stage; its features lie beside the cache."""
    train = TrainConfig.model_validate({"model": SMALL, "batch_size": 6, "precision": "fp32"} | settings)
    manifest = open_cache(cache)
    torch.manual_seed(2)
    # Weights drawn at random stand for pretrained ones.
    classifier = build_classifier(SMALL, "none", len(manifest.classes), train.freeze_backbone)
    folder = str(Path(cache.url).parent / "features")
    return Setting(train, None, cache, manifest, folder, classifier, CPU, SingleProcess())


def new_progress(**where: int) -> Progress:
    """Return where a training begins."""
    return Progress(EarlyStopping(patience=2, min_delta=0.0, higher_is_better=True), **where)


def prepare(setting: Setting, number: int = 0, **where: int) -> Trainable:
    """Make a stage ready."""
    return prepare_stage(setting, stages_of(setting.train)[number], new_progress(**where))


def labelled_cache(folder: Path, **labels: list[int]) -> CacheRef:
    """Write a cache of noise with these labels of three classes in each split."""
    return write_cache(
        str(folder),
        {split: len(of_split) for split, of_split in labels.items()},
        lambda split, row: (
            np.random.default_rng(row).integers(0, 256, (32, 32, 3), dtype=np.uint8),
            labels[split][row],
        ),
        ("ant", "bee", "cat"),
        CacheConfig(image_size=32),
        rows_per_group=3,
        groups_per_file=2,
    )


def test_a_batch_larger_than_the_split_is_refused_with_what_is_possible(cache: CacheRef) -> None:
    """In one sentence with both numbers; all pictures in a step are allowed."""
    with pytest.raises(
        WrongInput, match=r"^train.batch_size is 46, and the split 'train' has 45 pictures: .*; give at most 45"
    ) as refused:
        setting_of(cache, batch_size=46).check()
    assert "\n" not in str(refused.value)

    setting_of(cache, batch_size=45).check()
    setting_of(cache, batch_size="auto").check()


def test_ranks_together_take_no_more_than_there_is(cache: CacheRef) -> None:
    """A step is a batch on each rank; and each rank has a picture."""

    class Many(SingleProcess):
        def __init__(self, num_ranks: int) -> None:
            self.num_ranks = num_ranks

    with pytest.raises(WrongInput, match=r"^train.batch_size is 16 on each of 3 ranks, .* give at most 15,"):
        replace(setting_of(cache, batch_size=16), reducer=Many(3)).check()
    replace(setting_of(cache, batch_size=15), reducer=Many(3)).check()
    with pytest.raises(WrongInput, match=r"^distributed.num_ranks is 46, .* give at most 45$"):
        replace(setting_of(cache, batch_size=1), reducer=Many(46)).check()


def test_a_class_that_is_never_trained_on_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the split that has pictures of it; one that is in no other split is not."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 6, val=[0, 2, 1], test=[0, 0, 0])
    setting_of(cache).check()

    assert caplog.messages == [
        "no picture of bee, cat is in the split 'train', so those in 'val' cannot be recognised: add some"
    ]


def test_classes_that_are_all_trained_on_are_no_news(cache: CacheRef, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said."""
    setting_of(cache).check()
    assert not caplog.messages


def test_a_class_counts_by_how_rare_it_is(tmp_path: Path) -> None:
    """By n / (K n_k) over the classes that are there, the mean over pictures is 1; one without any counts 0."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 5 + [1], val=[0, 1, 2], test=[0])

    weights = setting_of(cache, class_weights="balanced").class_weights()

    assert weights is not None
    assert weights.tolist() == pytest.approx([6 / (2 * 5), 6 / (2 * 1), 0.0])
    assert setting_of(cache, class_weights="none").class_weights() is None


@pytest.mark.parametrize("feature_cache", [True, False])
def test_a_class_of_one_picture_trains(tmp_path: Path, *, feature_cache: bool) -> None:
    """Its weight is a number, and so is all that an epoch makes of it, on features and on pictures."""
    cache = labelled_cache(tmp_path / "cache", train=[0] * 7 + [1] * 5 + [2], val=[0, 1, 2], test=[0])
    made = prepare(setting_of(cache, class_weights="balanced", feature_cache=feature_cache))
    before = nn.utils.parameters_to_vector(made.model.parameters()).detach().clone()

    trained = train_one_epoch(
        made.model, made.loaders[TRAIN], made.optimizer, made.learning_rate, 0, CPU, SingleProcess(), made.settings
    )

    assert made.settings.class_weights_K is not None
    assert made.settings.class_weights_K.tolist() == pytest.approx([13 / 21, 13 / 15, 13 / 3])
    after = nn.utils.parameters_to_vector(made.model.parameters())
    assert 0.0 < trained.loss < float("inf")
    assert bool(after.isfinite().all())
    assert not torch.equal(after, before)


def test_the_head_of_a_frozen_backbone_is_trained_on_features(cache: CacheRef) -> None:
    """Where nothing says otherwise: the model is the head alone, a batch is what the backbone gave."""
    setting = setting_of(cache)
    made = prepare(setting)

    assert made.model is setting.classifier.head
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
def test_the_whole_network_is_trained_on_pictures(cache: CacheRef, settings: dict[str, object]) -> None:
    """Asked for, or because features would be other ones in each epoch; none are made."""
    setting = setting_of(cache, **settings)
    made = prepare(setting)

    assert made.model is setting.classifier
    for loader in made.loaders.values():
        batch = next(iter(loader.epoch(0)))
        assert (batch.inputs.dtype, batch.inputs.shape) == (torch.uint8, (6, 32, 32, 3))
    assert not Path(setting.folder).exists()
    assert (made.settings.augment is not None) == ("augmentation" in settings)


def test_a_stage_that_unfreezes_trains_the_named_layers_on_pictures(cache: CacheRef) -> None:
    """After an epoch they have moved and none before them; there batch norm takes no statistics."""
    stage = FineTuneStage(unfreeze_from="conv5", learning_rate=0.01, max_epochs=2)
    setting = setting_of(cache, fine_tune=[stage])
    network = setting.classifier.network
    before = {name: value.clone() for name, value in network.state_dict().items()}

    made = prepare(setting, 1)
    assert made.model is setting.classifier
    train_one_epoch(
        made.model, made.loaders[TRAIN], made.optimizer, made.learning_rate, 0, CPU, SingleProcess(), made.settings
    )

    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith(("conv5.", "fc."))}
    norms = {name: module for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert {name for name, norm in norms.items() if norm.training} == {"conv5.1"}
    assert len(norms) > 1


def test_a_later_stage_has_a_learning_rate_of_its_own_from_its_first_epoch(cache: CacheRef) -> None:
    """Epochs count over all stages, its schedule begins with it and ends with it."""
    stage = FineTuneStage(unfreeze_from="conv5", learning_rate=0.01, max_epochs=2)
    made = prepare(setting_of(cache, fine_tune=[stage], learning_rate=0.5), 1, first_epoch=3)
    steps = made.loaders[TRAIN].num_steps

    rates = [made.learning_rate(step) for step in range(3 * steps, 5 * steps)]
    assert rates[0] == pytest.approx(0.01, rel=0.01)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.001


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_the_optimizer_is_fused_and_has_what_learns(cache: CacheRef, name: str, kind: type) -> None:
    """With the stage's rate and the decay that was asked for."""
    setting = setting_of(cache, optimizer=name, learning_rate=0.25, weight_decay=0.125, feature_cache=False)
    (group,) = prepare(setting).optimizer.param_groups

    assert type(prepare(setting).optimizer) is kind
    assert (group["fused"], group["lr"], group["weight_decay"]) == (True, 0.25, 0.125)
    assert [id(one) for one in group["params"]] == [id(one) for one in setting.classifier.head.parameters()]


def test_a_batch_size_is_chosen_once(cache: CacheRef) -> None:
    """It is in the progress, so in the checkpoint: a process with more memory goes on with the same steps."""
    progress = new_progress()
    setting = setting_of(cache, batch_size="auto")
    made = prepare_stage(setting, stages_of(setting.train)[0], progress)
    # The largest power of two of which 20 steps make an epoch of 45 pictures.
    assert progress.batch_size == 2
    assert len(next(iter(made.loaders[TRAIN].epoch(0))).labels_B) == 2

    progress.batch_size = 5
    resumed = prepare_stage(setting, stages_of(setting.train)[0], progress)
    assert progress.batch_size == 5
    assert len(next(iter(resumed.loaders[TRAIN].epoch(0))).labels_B) == 5
