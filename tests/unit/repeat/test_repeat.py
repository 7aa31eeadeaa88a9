"""A repetition: what it compares, and what it names."""

from collections.abc import Callable

import pytest
import torch

from tasks import tracking
from tasks.cache.manifest import open_cache
from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.device import processor_name
from tasks.refs import CacheRef, MetricPair
from tasks.repeat.repeat import (
    FirstTraining,
    check_same_data,
    compare_metrics,
    differences_now,
    differences_of,
)
from tasks.train.identity import run_key

TRAIN = TrainConfig(weights="none", freeze_backbone=False, device="cpu", precision="fp32")


def first(**values: object) -> FirstTraining:
    """Return a training as it was logged a moment ago, with other values in it."""
    now = {
        "run_id": "r",
        "train": TRAIN,
        "distributed": None,
        "cache": CacheConfig(),
        "cache_digest": "d",
        "table": "/tables/images",
        "version": 3,
        "content_digest": "content",
        "weights_digest": "none",
        "device": "cpu",
        "precision": "float32",
        "batch_sizes": {},
        "versions": tracking.package_versions(),
        "code_version": tracking.code_commit(),
        "metrics": {},
        "unknown_then": [],
    }
    return FirstTraining.model_validate(now | values)


def test_nothing_is_different_a_moment_later() -> None:
    """Same packages, same code, same weights."""
    assert differences_now(first()) == []


def test_what_is_different_is_named_before_anything_is_trained() -> None:
    """A sentence each, with what was and what is; also what a training would find for itself."""
    versions = tracking.package_versions()
    before = first(
        versions=versions | {"torch": "1.0", "gone": "2.0"},
        code_version="abc",
        device="cuda:0",
        processor="H200",
        precision="bfloat16",
        num_threads=7,
        train=TrainConfig(device="cpu", precision="fp32", num_threads=3),
        gone_on="torch was 0.9 and is 1.0",
        weights_digest="mobilenet_v2-b0353104.pth",  # Of an older torchvision.
        unknown_then=["label_smoothing"],
    )

    assert differences_now(before) == [
        "the device was cuda and is cpu",
        f"the processor was H200 and is {processor_name(torch.device('cpu'))}",
        "the precision was bfloat16 and is float32",
        "the number of threads was 7 and is 3",
        f"the code was abc and is {tracking.code_commit()}",
        f"torch was 1.0 and is {versions['torch']}",
        "gone was 2.0 and is not there",
        "MLflow run r was not computed in one way: torch was 0.9 and is 1.0",
        "train.weights 'DEFAULT' were mobilenet_v2-b0353104.pth and are mobilenet_v2-7ebf99e0.pth",
        "train.label_smoothing was no setting then, and has its default",
    ]


def test_what_a_training_finds_for_itself_is_compared() -> None:
    """Device, processor, number format, and the batch sizes that it chose."""
    before = first(batch_sizes={"0": "64"}, processor="EPYC")

    assert differences_of(before, before) == []
    now = first(
        run_id="s",
        device="cuda:0",
        processor="H200",
        precision="bfloat16",
        batch_sizes={"0": "32", "1": "16"},
        gone_on="the number of threads was 2 and is 4",
    )
    assert differences_of(before, now) == [
        "the device was cpu and is cuda",
        "the processor was EPYC and is H200",
        "the precision was float32 and is bfloat16",
        "MLflow run s was not computed in one way: the number of threads was 2 and is 4",
        "the batch size of stage 0 was 64 and is 32",
        "the batch size of stage 1 was not chosen and is 16",
    ]
    # One of two GPUs of the same name computes what the other does.
    assert differences_of(now, now.model_copy(update={"device": "cuda:1"})) == [
        "MLflow run s was not computed in one way: the number of threads was 2 and is 4"
    ]
    # A run of an older version did not say what it computed on.
    assert differences_of(first(), first(processor="H200")) == []


def test_other_data_is_refused_and_other_pixels_are_named(make_cache: Callable[..., CacheRef]) -> None:
    """The same version of a table that was made anew is other data."""
    cache = make_cache({"train": 3, "val": 3, "test": 3})
    digest = open_cache(cache).digest

    assert check_same_data(first(cache_digest=digest), cache) == []
    assert check_same_data(first(), cache) == [f"the cache was d and is {digest}: images are decoded to other pixels"]
    with pytest.raises(WrongInput, match="version 3 has the content content, but MLflow run r was trained on other"):
        check_same_data(first(content_digest="other"), cache)


def test_metrics_of_val_and_test_are_compared_to_the_last_digit() -> None:
    """Speed and the like are not, and a metric that one of the two has not is no agreement."""
    before = {"val_loss": 0.5, "test_loss": 0.25, "images_per_second": 9.0, "best_val_accuracy": 1.0}
    now = {"val_loss": 0.5, "test_loss": 0.25000000000000006, "images_per_second": 8.0}

    pairs = compare_metrics(before, now)

    assert pairs == [
        MetricPair(metric="best_val_accuracy", before=1.0, now=None),
        MetricPair(metric="test_loss", before=0.25, now=0.25000000000000006),
        MetricPair(metric="val_loss", before=0.5, now=0.5),
    ]
    assert [pair.agrees for pair in pairs] == [False, False, True]


def test_a_repetition_has_a_key_of_its_own() -> None:
    """Or the first run would be found, and nothing trained."""
    cache = CacheRef(url="/cache", digest="d")
    keys = {run_key(TRAIN, cache, None, repetition) for repetition in (None, "one", "two")}

    assert len(keys) == 3
