"""Identity of training runs across releases: settings that are added, changed defaults, settings without effect."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from tasks.config.augmentation import AugmentationConfig
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.frozen import RECORDED, AsBefore
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.train.continuation import adopt_checkpoint, can_be_continued, continued_run, continues
from tasks.train.spec import TrainingSpec, run_key, run_keys
from tasks.tune.space import study_name

CACHE = CacheRef(url="/caches/a", digest="d" * 64)
SCRATCH = {"weights": "none", "freeze_backbone": False}


@pytest.fixture(autouse=True)
def weights_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all weights one digest, so that keys do not depend on the installed torchvision."""
    monkeypatch.setattr("tasks.model.pretrained.weights_digest", lambda _model, _weights: "w")


def key(train: TrainConfig, distributed: DistributedConfig | None = None) -> str:
    """Return the key of a training run."""
    return run_key(train, CACHE, distributed)


@pytest.mark.parametrize(
    ("train", "distributed", "expected"),
    [
        ({}, None, "fbc2040429789d63"),
        (SCRATCH, None, "5016f5f72beae3e2"),
        (SCRATCH | {"augmentation": {"flip": True}, "batch_size": "auto"}, None, "dcffe7a043b3834a"),
        ({"fine_tune": [{"unfreeze_from": "all"}]}, None, "3e08e6f6b49aed1b"),
        ({}, {}, "b1c1005260cda2bc"),
        ({}, {"backend": "horovod"}, "b1c1005260cda2bc"),
        ({}, {"sync_batch_norm": True}, "a8920f8e1b58eecb"),
        ({}, {"backend": "torch", "sync_batch_norm": True}, "a8920f8e1b58eecb"),
        ({"num_threads": 3}, None, "a7438c4552950ba9"),
        (SCRATCH | {"compile": True}, None, "458bb5d1b45e7af5"),
    ],
)
def test_finished_runs_of_earlier_releases_are_found_by_their_keys(
    train: dict[str, Any], distributed: dict[str, Any] | None, expected: str
) -> None:
    """These keys are in MLflow and in the names of checkpoints' folders: mark a new setting with AsBefore."""
    ranks = None if distributed is None else DistributedConfig.model_validate(distributed)
    assert expected in run_keys(TrainConfig.model_validate({"recipe": "given"} | train), CACHE, ranks)


def test_searches_of_earlier_releases_resume() -> None:
    """The name of a study is a digest of its settings as earlier releases computed it."""
    assert study_name(TrainConfig(recipe="given"), TuneConfig(), CACHE) == "f98a62eddeeccb23"
    assert study_name(TrainConfig(recipe="given", num_threads=3), TuneConfig(), CACHE) == "a5f7dad73b63c828"


class LaterAugmentation(AugmentationConfig):
    """Augmentation of a later release."""

    blur: Annotated[float, AsBefore(0.0)] = 0.0


class Later(TrainConfig):
    """Settings of a later release, some of them with defaults that change the result."""

    neutral_default: Annotated[int, AsBefore(0)] = 0
    other_default: Annotated[str, AsBefore("off")] = "on"
    augmentation: AugmentationConfig = LaterAugmentation()


class OtherDefault(TrainConfig):
    """Settings of a later release with another default of an existing setting."""

    seed: int = Field(2, ge=1)


def test_setting_that_is_added_changes_only_the_keys_of_runs_that_it_affects() -> None:
    """The value that means as before leaves the key; a default that is another value changes it."""
    before = key(TrainConfig())

    assert key(Later(other_default="off")) == before
    assert key(Later()) != before
    assert key(Later(other_default="off", neutral_default=1)) != before
    assert key(Later(other_default="off", augmentation=LaterAugmentation(blur=0.5))) != before


def test_changed_default_changes_the_key_of_runs_that_leave_it_out_and_of_no_other() -> None:
    """The value counts and not whether it was given, with settings of all ages."""
    assert key(OtherDefault()) == key(TrainConfig(seed=2)) != key(TrainConfig())
    assert key(OtherDefault(seed=1)) == key(TrainConfig())

    class OtherBackend(DistributedConfig):
        backend: Annotated[Any, AsBefore("horovod")] = "torch"

    assert key(TrainConfig(), OtherBackend()) == key(TrainConfig(), DistributedConfig(backend="torch"))
    assert key(TrainConfig(), OtherBackend(backend="horovod")) == key(TrainConfig(), DistributedConfig())


def test_recorded_settings_have_for_those_that_they_lack_the_value_that_means_as_before() -> None:
    """A repetition of a run of an older release trains as that run did, whatever the defaults are now."""
    recorded = TrainConfig().model_dump() | {"augmentation": {"flip": True}}

    read = Later.model_validate(recorded, context=RECORDED)

    assert (read.neutral_default, read.other_default) == (0, "off")
    assert key(read) == key(TrainConfig(augmentation=AugmentationConfig(flip=True, by_recipe=False)))
    assert Later.model_validate(recorded).other_default == "on"
    assert CacheConfig.model_validate({"image_size": 32}, context=RECORDED) == CacheConfig(image_size=32)


def test_threads_and_compilation_are_no_part_of_a_run_that_they_do_not_affect() -> None:
    """A head on cached features is never compiled; a whole network has other rounding."""
    assert key(TrainConfig(recipe="head", num_threads=3, compile=True)) == key(TrainConfig(recipe="head"))
    assert key(TrainConfig(device="cuda", num_threads=3, **SCRATCH)) == key(TrainConfig(device="cuda", **SCRATCH))
    assert len({key(TrainConfig(**SCRATCH, **more)) for more in ({}, {"num_threads": 3}, {"compile": True})}) == 3
    assert run_keys(TrainConfig(), CACHE, None) == [key(TrainConfig())]
    assert key(TrainConfig(num_threads=3)) != key(TrainConfig())


def spec_of(folder: Path, **train: Any) -> TrainingSpec:
    """Return a training run."""
    storage = resolve_storage(StorageConfig(home=str(folder)))
    return TrainingSpec(train=TrainConfig.model_validate({"recipe": "given"} | train), cache=CACHE, storage=storage)


def content_of(spec: TrainingSpec, batch_size: int = 32, phase: int = 0) -> dict[str, Any]:
    """Return what counts of a checkpoint of a run."""
    return {"config": spec.identity, "batch_size": batch_size, "phase": phase, "run_id": "r"}


@pytest.mark.parametrize(
    ("settings", "batch_size", "expected"),
    [
        ({"schedule": "constant"}, 32, True),
        ({"schedule": "plateau"}, 32, True),
        ({"schedule": "cosine"}, 32, False),
        ({"schedule": "one_cycle"}, 32, False),
        # The default warm-up to a rate that is scaled up takes a quarter of the epochs.
        ({"schedule": "constant"}, 64, False),
        ({"schedule": "constant", "warmup_epochs": 1.0}, 64, True),
    ],
)
def test_more_epochs_continue_a_run_whose_learning_rates_stay_the_same(
    tmp_path: Path, settings: dict[str, Any], batch_size: int, expected: bool
) -> None:
    """The schedules that depend on the number of epochs start again, and so does another warm-up."""
    fewer, more = (spec_of(tmp_path, **settings, max_epochs=epochs) for epochs in (4, 8))
    content = content_of(fewer, batch_size)

    assert continues(more, content) == expected
    assert continues(fewer, content_of(more, batch_size)) is False
    assert continues(more, content_of(fewer, batch_size, phase=1)) is False
    assert (continued_run(more, content), continued_run(fewer, content)) == ("r", None)


def test_damaged_checkpoint_under_another_key_is_refused_only_if_it_is_of_this_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run begins from the start if the checkpoint of fewer epochs is damaged, as it would without it."""
    spec = spec_of(tmp_path, schedule="constant", max_epochs=4, num_threads=3)
    fewer = spec_of(tmp_path, schedule="constant", max_epochs=3)
    folders = [spec.storage.checkpoints / key for key in (fewer.key, spec.keys[1])]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "step-00-000001-000000000000+.pt").write_bytes(b"torn")

    with pytest.raises(WrongInput, match=f"no checkpoint in '{folders[1]}' can be read"):
        adopt_checkpoint(spec)
    shutil.rmtree(folders[1])
    adopt_checkpoint(spec)

    assert f"training does not continue there: no checkpoint in '{folders[0]}' can be read" in "\n".join(
        caplog.messages
    )
    assert not (spec.storage.checkpoints / spec.key).exists()


def test_trials_and_repetitions_are_not_continued(tmp_path: Path) -> None:
    """Their last checkpoints are not kept."""
    spec = spec_of(tmp_path, schedule="constant")

    assert can_be_continued(spec)
    assert not can_be_continued(spec.model_copy(update={"repetition": "one"}))
    assert not can_be_continued(spec.model_copy(update={"tags": {"lakevision.trial": "3"}}))
    assert not can_be_continued(spec_of(tmp_path))
