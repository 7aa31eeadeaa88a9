"""Repetition of a training run: comparison of data, provenance and metrics."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch

from tasks.cache.manifest import open_cache
from tasks.checks import original_run
from tasks.checks.original_run import OriginalRun
from tasks.checks.repeat import check_same_data, compare_metrics, differences_now, differences_of, repeat_training
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.frozen import AsBefore
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.device import processor_name
from tasks.refs import CacheRef, MetricPair
from tasks.storage import Storage, resolve_storage
from tasks.tracking.runs import code_commit, package_versions
from tasks.tracking.trained import LoggedTraining
from tasks.train.spec import TrainingSpec, run_key

TRAIN = TrainConfig(weights="none", freeze_backbone=False, device="cpu", precision="fp32")


def logged_run(**values: object) -> OriginalRun:
    """Return a training run that was just logged, with some values changed."""
    now = {
        "run_id": "r",
        "train": TRAIN,
        "distributed": None,
        "cache_config": CacheConfig(),
        "cache_digest": "d",
        "table": "/tables/images",
        "version": 3,
        "content_digest": "content",
        "weights_digest": "none",
        "device": "cpu",
        "precision": "float32",
        "batch_sizes": {},
        "versions": package_versions(),
        "code_version": code_commit(),
        "metrics": {},
        "new_settings": [],
    }
    return OriginalRun.model_validate(now | values)


def test_immediate_repetition_has_no_differences() -> None:
    """Packages, code and weights are the same."""
    assert differences_now(logged_run()) == []


def test_differences_are_listed_before_training() -> None:
    """Each difference is a sentence with the old and the new value, including those otherwise found during training."""
    versions = package_versions()
    before = logged_run(
        versions=versions | {"torch": "1.0", "gone": "2.0"},
        code_version="abc",
        device="cuda:0",
        processor="H200",
        precision="bfloat16",
        num_threads=7,
        train=TrainConfig(device="cpu", precision="fp32", num_threads=3),
        resumed_with_changes="torch was 0.9 and is 1.0",
        weights_digest="mobilenet_v2-b0353104.pth",  # Weights of an older torchvision.
        new_settings=["label_smoothing"],
    )

    assert differences_now(before) == [
        "the device was cuda and is cpu",
        f"the processor was H200 and is {processor_name(torch.device('cpu'))}",
        "the precision was bfloat16 and is float32",
        "the number of threads was 7 and is 3",
        f"the code was abc and is {code_commit()}",
        f"torch was 1.0 and is {versions['torch']}",
        "gone was 2.0 and is missing",
        "MLflow run r was resumed with changes: torch was 0.9 and is 1.0",
        "train.weights 'DEFAULT' were mobilenet_v2-b0353104.pth and are mobilenet_v2-7ebf99e0.pth",
        "train.label_smoothing did not exist then, and has its default",
    ]


def test_values_determined_by_training_are_compared() -> None:
    """Device, processor, precision and automatic batch sizes of both runs are compared."""
    before = logged_run(batch_sizes={"0": "64"}, processor="EPYC")

    assert differences_of(before, before) == []
    now = logged_run(
        run_id="s",
        device="cuda:0",
        processor="H200",
        precision="bfloat16",
        batch_sizes={"0": "32", "1": "16"},
        resumed_with_changes="the number of threads was 2 and is 4",
    )
    assert differences_of(before, now) == [
        "the device was cpu and is cuda",
        "the processor was EPYC and is H200",
        "the precision was float32 and is bfloat16",
        "MLflow run s was resumed with changes: the number of threads was 2 and is 4",
        "the batch size of phase 0 was 64 and is 32",
        "the batch size of phase 1 was not chosen and is 16",
    ]
    # Two GPUs of the same name compute the same.
    assert differences_of(now, now.model_copy(update={"device": "cuda:1"})) == [
        "MLflow run s was resumed with changes: the number of threads was 2 and is 4"
    ]
    # Runs of older versions did not log the processor.
    assert differences_of(logged_run(), logged_run(processor="H200")) == []


def test_different_data_is_refused_and_different_pixels_are_listed(make_cache: Callable[..., CacheRef]) -> None:
    """The same version number of a recreated table is different data."""
    cache = make_cache({"train": 3, "val": 3, "test": 3})
    digest = open_cache(cache).digest

    assert check_same_data(logged_run(cache_digest=digest), cache) == []
    assert check_same_data(logged_run(), cache) == [
        f"the cache was d and is {digest}: images are decoded to different pixels"
    ]
    with pytest.raises(WrongInput, match="content content, .* run r was trained on other"):
        check_same_data(logged_run(content_digest="other"), cache)


def test_metrics_of_val_and_test_are_compared_exactly() -> None:
    """Timings are not compared, and a metric that one run lacks does not agree."""
    before = {"val_loss": 0.5, "test_loss": 0.25, "images_per_second": 9.0, "best_val_accuracy": 1.0}
    now = {"val_loss": 0.5, "test_loss": 0.25000000000000006, "images_per_second": 8.0}

    pairs = compare_metrics(before, now)

    assert pairs == [
        MetricPair(metric="best_val_accuracy", before=1.0, now=None),
        MetricPair(metric="test_loss", before=0.25, now=0.25000000000000006),
        MetricPair(metric="val_loss", before=0.5, now=0.5),
    ]
    assert [pair.agrees for pair in pairs] == [False, False, True]


class Launched(Exception):
    """Raised in place of a start of ranks."""


ON_HOSTS = {"launcher": "hosts", "hosts": "node1:2,node2:2", "num_ranks": 4, "shared_home": False}


@pytest.mark.parametrize(
    "distributed",
    [
        ON_HOSTS,
        ON_HOSTS | {"interface": "ib0", "host_python": "/opt/python", "host_folder": "/opt/code", "ssh_config": "/ssh"},
        {"launcher": "spark", "num_ranks": 4, "shared_home": False, "interface": "eth0"},
        {"launcher": "spark", "num_ranks": 4, "max_restarts": 2, "min_ranks": 3},
        {"num_ranks": 4, "where": "work_pool", "work_pool": "big", "job_variables": {"memory": "9Gi"}},
        {"num_ranks": 4, "backend": "torch", "gradient_compression": "bf16", "log_ranks": "all"},
        {"num_ranks": 4, "sync_batch_norm": True, "stall_timeout_seconds": 60, "max_restarts": 1},
    ],
)
def test_ranks_of_a_repetition_start_on_this_machine_wherever_they_were(
    distributed: dict[str, Any],
    make_cache: Callable[..., CacheRef],
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read a valid specification with what decides the result, and without places and pools."""
    specs: list[TrainingSpec] = []

    def launch(spec: TrainingSpec) -> None:
        specs.append(TrainingSpec.model_validate_json(spec.model_dump_json()))  # as the launcher and each rank do
        raise Launched

    monkeypatch.setattr("tasks.checks.repeat.launch_ranks", launch)
    original = logged_run(distributed=DistributedConfig.model_validate(distributed))
    cache = make_cache({"train": 3, "val": 3, "test": 3})

    with pytest.raises(Launched):
        repeat_training(original, cache, storage, {})

    (ranks,) = (spec.distributed for spec in specs)
    assert ranks is not None
    assert original.distributed is not None
    assert ranks.decisive() == original.distributed.decisive()
    places = {"launcher", "where", "work_pool", "job_variables", "hosts", "interface", "ssh_config", "shared_home"}
    assert ranks.model_dump(include=places) == DistributedConfig().model_dump(include=places)
    kept = {"max_restarts", "min_ranks", "stall_timeout_seconds", "log_ranks"}
    assert ranks.model_dump(include=kept) == original.distributed.model_dump(include=kept)


def test_settings_that_a_run_did_not_record_have_the_value_that_means_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not differ from the original; those without such a value have their default and are named."""

    class Later(TrainConfig):
        marked: Annotated[str, AsBefore("off")] = "on"
        unmarked: int = 7

    config = {
        "train": TRAIN.model_dump(),
        "distributed": None,
        "cache": {"settings": CacheConfig().decisive(), "digest": "d"},
        "data": {"table": "/tables/images", "version": 3, "content_digest": "content"},
        "weights_digest": "none",
        "device": "cpu",
        "precision": "float32",
    }
    logged = LoggedTraining("r", config, {}, None, {}, {})
    monkeypatch.setattr("tasks.checks.original_run.logged_training", lambda _storage, _run_id: logged)
    monkeypatch.setattr(original_run, "TrainConfig", Later)

    found = original_run.read_training("r", resolve_storage(StorageConfig()))

    assert isinstance(found.train, TrainConfig)
    assert found.train.model_dump()["marked"] == "off"
    assert found.new_settings == ["unmarked"]


def test_repetition_has_a_different_key() -> None:
    """With the key of the original run, that run would be found, and nothing would be trained."""
    cache = CacheRef(url="/cache", digest="d")
    keys = {run_key(TRAIN, cache, None, repetition) for repetition in (None, "one", "two")}

    assert len(keys) == 3
