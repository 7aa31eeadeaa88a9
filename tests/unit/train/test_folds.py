"""Cross-validation of the head on cached features."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.refs import TEST, TRAIN, VAL, CacheRef
from tasks.train.context import TrainingContext
from tasks.train.folds import cross_validate, mean_and_interval
from tests.builders.caches import write_cache
from tests.builders.phases import context_of

ROWS = {TRAIN: 36, VAL: 9, TEST: 3}


def cache_of(folder: Path, *, told: bool) -> CacheRef:
    """Write a cache of three classes, told apart by their colour or not at all."""

    def image(split: str, row: int) -> tuple[np.ndarray, int]:
        drawn = np.random.default_rng((row, len(split))).integers(0, 60, (32, 32, 3), dtype=np.uint8)
        drawn[..., row % 3] += np.uint8(180 if told else 0)
        return drawn, row % 3

    return write_cache(
        str(folder), ROWS, image, ("ant", "bee", "cat"), CacheConfig(image_size=32), rows_per_group=3, groups_per_file=2
    )


def context(cache: CacheRef, **settings: object) -> TrainingContext:
    """Return the context of a training run with five parts."""
    return context_of(cache, recipe="auto", **{"folds": 5, **settings})


@pytest.mark.parametrize("settings", [{}, {"sampling": "balanced"}, {"weight_decay": 0.1, "folds": 3}])
def test_parts_measure_what_the_head_learns(tmp_path: Path, settings: dict[str, object]) -> None:
    """Classes that the features tell apart are recognised, and others are not; the network does not change."""
    told, untold = (context(cache_of(tmp_path / f"{yes}", told=yes), **settings) for yes in (True, False))
    before = {name: value.clone() for name, value in told.classifier.state_dict().items()}

    found = cross_validate(told)

    assert len(found) == settings.get("folds", 5)
    assert np.mean(found) > 0.9
    assert np.mean(cross_validate(untold)) < 0.7
    assert cross_validate(told) == found, "the same seed draws the same parts and heads"
    assert all(torch.equal(value, before[name]) for name, value in told.classifier.state_dict().items())


def test_each_image_is_tested_once_and_trains_no_head_that_it_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test, validation and training images of a part are different ones."""
    held: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(
        "tasks.train.folds._test_head",
        lambda _context, loaders, _inputs: held.append({split: one._held[0] for split, one in loaders.items()}) or 0.5,
    )
    cross_validate(context(cache_of(tmp_path / "cache", told=True)))

    tested = torch.cat([parts[TEST] for parts in held])
    assert len(tested) == len({tuple(row.tolist()) for row in tested}) == ROWS[TRAIN] + ROWS[VAL]
    for parts in held:
        rows = [{tuple(row.tolist()) for row in parts[split]} for split in (TRAIN, VAL, TEST)]
        assert sum(map(len, rows)) == len(set.union(*rows)) == ROWS[TRAIN] + ROWS[VAL]


def test_interval_is_corrected_for_shared_training_images() -> None:
    """With 5 parts the variance counts 1/5 + 1/4 times, and Student's t has 4 degrees of freedom."""
    mean, low, high = mean_and_interval([0.8, 0.9, 0.85, 0.95, 0.75])

    half = 2.7764 * np.sqrt((1 / 5 + 1 / 4) * 0.00625)
    assert (mean, low, high) == (
        pytest.approx(0.85),
        pytest.approx(0.85 - half, abs=1e-4),
        pytest.approx(0.85 + half, abs=1e-4),
    )
    assert mean_and_interval([0.5] * 3) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"folds": 2}, "folds is 2, fewer than the 3 of training, validation and test: give at least 3, or 0"),
        ({"folds": 5, "recipe": "scratch"}, "folds is 5, and the training run has no cached features: leave it out"),
        ({"sampling": "balanced", "class_weights": "balanced"}, "would count small classes twice: leave out one"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, object], sentence: str) -> None:
    """The sentence has the setting, its value and the way out."""
    with pytest.raises(ValidationError, match=sentence):
        TrainConfig.model_validate(settings)


def test_unequal_classes_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a ratio above ten, unless they are balanced."""
    sizes = [22, 2]
    cache = write_cache(
        str(tmp_path / "cache"),
        {TRAIN: 24, VAL: 2, TEST: 2},
        lambda _split, row: (np.zeros((32, 32, 3), dtype=np.uint8), int(row >= sizes[0])),
        ("ant", "bee"),
        CacheConfig(image_size=32),
        rows_per_group=3,
        groups_per_file=2,
    )
    for settings, is_said in (({}, True), ({"sampling": "balanced"}, False), ({"class_weights": "balanced"}, False)):
        caplog.clear()
        context_of(cache, **settings).check()
        assert ("2 to 22 images" in caplog.text) == is_said
