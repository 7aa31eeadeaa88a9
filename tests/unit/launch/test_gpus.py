"""The backend of ranks that fits the GPUs of their machine."""

import logging
from typing import Any

import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.launch.gpus import choose_backend
from tasks.launch.launcher import launch_ranks
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.tracking.tracked_run import tracked_run
from tasks.train.spec import TrainingSpec, run_key

CACHE = CacheRef(url="cache", digest="digest")
SCRATCH = TrainConfig(weights="none", freeze_backbone=False)


def see_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int, built_with_nccl: str) -> None:
    """Let torch see so many GPUs, and have the named backends NCCL."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(f"GPU-{number}" for number in range(num_gpus)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for module in ("system.cores", "launch.gpus"):
        monkeypatch.setattr(f"tasks.{module}.has_nccl", lambda backend: backend in built_with_nccl.split())


BOTH = "horovod torch"


@pytest.mark.parametrize(
    ("num_gpus", "built_with_nccl", "device", "settings", "backend", "reason"),
    [
        (0, "torch", "auto", {}, "horovod", "its build fits the device"),
        (2, "torch", "cpu", {}, "horovod", "its build fits the device"),
        (2, BOTH, "auto", {}, "horovod", "its build fits the device"),
        (2, "torch", "auto", {}, "torch", "Horovod was built without NCCL"),
        (2, "torch", "cuda", {}, "torch", "Horovod was built without NCCL"),
        (2, "torch", "auto", {"num_ranks": 3}, "horovod", "no backend can use GPUs here"),
        (2, "torch", "auto", {"num_ranks": 1}, "horovod", "its build fits the device"),
        (2, "", "auto", {}, "horovod", "no backend can use GPUs here"),
        (2, BOTH, "auto", {"gradient_compression": "bf16"}, "torch", "Horovod cannot send bfloat16"),
        (2, "torch", "auto", {"backend": "horovod"}, "horovod", "distributed.backend is 'horovod'"),
        (0, "torch", "auto", {"backend": "torch"}, "torch", "distributed.backend is 'torch'"),
        # Ranks on other machines: those have the GPUs.
        (1, "torch", "auto", {"launcher": "spark"}, "torch", "Horovod was built without NCCL"),
        (0, "torch", "cuda", {"launcher": "spark"}, "torch", "Horovod was built without NCCL"),
        (0, BOTH, "cuda", {"launcher": "spark"}, "horovod", "its build fits the device"),
    ],
)
def test_auto_takes_horovod_where_its_build_fits_the_device_else_torch(
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_gpus: int,
    built_with_nccl: str,
    device: str,
    settings: dict[str, Any],
    backend: str,
    reason: str,
) -> None:
    """The log says which and why; key and identity are those of a run with that backend."""
    see_gpus(monkeypatch, num_gpus, built_with_nccl)
    given = DistributedConfig.model_validate(settings)
    train = SCRATCH.model_copy(update={"device": device})
    spec = TrainingSpec(train=train, distributed=given, cache=CACHE, storage=storage)

    with caplog.at_level(logging.INFO, "lakevision.ranks"):
        chosen = choose_backend(spec)

    assert (chosen.distributed, chosen.backend_reason) == (given.model_copy(update={"backend": backend}), reason)
    assert caplog.messages == [f"the gradients of {given.num_ranks} ranks are averaged by {backend}: {reason}"]
    other = {"horovod": "torch", "torch": "horovod"}[backend]
    named = given.model_copy(update={"backend": backend})
    assert (
        chosen.key == run_key(train, CACHE, named) != run_key(train, CACHE, given.model_copy(update={"backend": other}))
    )
    assert chosen.key in spec.keys


def test_horovod_that_is_not_installed_is_not_taken(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of a wheel without it trains with torch."""
    monkeypatch.setattr("tasks.launch.gpus.find_spec", lambda _name: None)
    spec = TrainingSpec(train=SCRATCH, distributed=DistributedConfig(), cache=CACHE, storage=storage)
    assert choose_backend(spec).backend_reason == "Horovod is not installed"


def test_finished_run_of_horovod_is_found_where_auto_takes_torch(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of an older release, whose default was Horovod, is not trained again."""
    see_gpus(monkeypatch, 2, "torch")
    spec = TrainingSpec(train=SCRATCH, distributed=DistributedConfig(), cache=CACHE, storage=storage)
    with tracked_run(
        storage, "older", run_key(SCRATCH, CACHE, DistributedConfig(backend="horovod")), {}, {}, None
    ) as run:
        run.log_metrics({"best_val_accuracy": 0.25}, step=0)
    assert launch_ranks(spec).run_id == run.run_id
