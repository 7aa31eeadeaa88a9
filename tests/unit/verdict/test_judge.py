"""The verdict of a cache: its features are those of the training run, and some training runs have none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.config.train import TrainConfig
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tasks.verdict.judge import judge_cache
from tests.builders.small_network import SMALL


def settings(weights: Path | str, **others: object) -> TrainConfig:
    """Return the settings of a short training run on the CPU."""
    return TrainConfig.model_validate(
        {"model": SMALL, "weights": str(weights), "max_epochs": 1, "batch_size": 8, "device": "cpu"} | others
    )


def test_training_finds_the_features_of_the_verdict(
    make_cache: Callable[..., CacheRef],
    weights: Path,
    storage: Storage,
    messages_of: Callable[[str], list[str]],
    caplog,
) -> None:
    """The same cache gives the same verdict apart from the measured speed, and nothing is computed twice."""
    caplog.set_level("INFO", "lakevision")
    cache, train = make_cache({"train": 40, "val": 9, "test": 9}, image_size=32), settings(weights)

    first, page = judge_cache(train, cache, storage)
    again, _ = judge_cache(train, cache, storage)
    train_model(TrainingSpec(train=train, cache=cache, storage=storage))

    assert first.line.startswith("expected test accuracy 0.")
    assert first.fine_tuning_images_per_second > 0
    numbers = {"accuracy", "interval", "worth_of_doubling", "curve", "weakest", "confused"}
    assert again.model_dump(include=numbers) == first.model_dump(include=numbers)
    assert page.startswith(f"# Verdict: {first.line}")
    lines = messages_of("lakevision.train")
    assert sum("running the frozen backbone over 49 images, once" in line for line in lines) == 1
    assert sum("already has the features of this backbone" in line for line in lines) == 2


@pytest.mark.parametrize("rows", [{"train": 3, "val": 2, "test": 1}, {"train": 4, "val": 0, "test": 2}], ids=str)
def test_few_images_have_a_verdict(
    make_cache: Callable[..., CacheRef], weights: Path, storage: Storage, rows: dict[str, int]
) -> None:
    """Six images, of which a class may be absent in val, are enough for a verdict with a wide interval."""
    verdict, page = judge_cache(settings(weights), make_cache(rows, image_size=32), storage)

    assert "images of 3 classes say no more than that" in verdict.line
    assert "nan" not in verdict.model_dump_json().lower()
    assert "## Learning curve" in page


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"weights": "none", "freeze_backbone": False}, "none: train.weights is 'none'"),
        ({"freeze_backbone": False}, "none: training has no cached features"),
        ({"feature_cache": False}, "none: training has no cached features"),
        ({"recipe": "head", "augmentation": {"flip": True}}, "none: training has no cached features"),
    ],
)
def test_training_without_features_has_no_verdict(
    make_cache: Callable[..., CacheRef], weights: Path, storage: Storage, changed: dict[str, object], why: str
) -> None:
    """The reason is one sentence, and nothing is computed."""
    cache = make_cache({"train": 4, "val": 2, "test": 2})

    verdict, page = judge_cache(settings(**({"weights": weights} | changed)), cache, storage)

    assert verdict.line.startswith(why)
    assert (verdict.accuracy, page) == (None, "")
    assert not list(Path(storage.home).rglob("manifest.json"))
