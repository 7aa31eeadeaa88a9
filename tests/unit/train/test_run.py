"""Key, device and optimizer of a training run."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import MobileNet_V2_Weights

from tasks.config.distributed import DistributedConfig
from tasks.config.recipe import PhaseTrain
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.device import choose_device, make_optimizer
from tasks.refs import CacheRef
from tasks.train.spec import run_key

CACHE = CacheRef(url="/caches/a", digest="d" * 64)


def test_key_does_not_depend_on_cache_location_or_work_pool() -> None:
    """A moved cache or another work pool does not change the key, since neither changes the result."""
    key = run_key(TrainConfig(), CACHE, DistributedConfig())

    assert run_key(TrainConfig(), CACHE.model_copy(update={"url": "/b"}), DistributedConfig()) == key
    assert run_key(TrainConfig(), CACHE, DistributedConfig(work_pool="other", where="in_place")) == key
    # Neither do lost ranks, whose batches the others take.
    assert run_key(TrainConfig(), CACHE, DistributedConfig(max_restarts=3, min_ranks=1)) == key


def test_key_depends_on_everything_that_decides_the_result() -> None:
    """Seed, batch size, cache, number of ranks, scaling and warm-up each change the key."""
    keys = {
        run_key(TrainConfig(), CACHE, None),
        run_key(TrainConfig(seed=2), CACHE, None),
        run_key(TrainConfig(batch_size=8), CACHE, None),
        run_key(TrainConfig(), CacheRef(url="/caches/a", digest="e" * 64), None),
        run_key(TrainConfig(), CACHE, DistributedConfig(num_ranks=2)),
        run_key(TrainConfig(), CACHE, DistributedConfig(num_ranks=3)),
        run_key(TrainConfig(scale_learning_rate="linear"), CACHE, None),
        run_key(TrainConfig(reference_batch_size=64), CACHE, None),
        run_key(TrainConfig(warmup_epochs=2.0), CACHE, None),
    }

    assert len(keys) == 9


def test_key_depends_on_the_content_of_weights_and_not_on_their_path(tmp_path: Path) -> None:
    """Another file at the same path changes the key, and the same file at another path does not."""
    first, second = tmp_path / "first.pth", tmp_path / "second.pth"
    first.write_bytes(b"old")
    second.write_bytes(b"old")
    key = run_key(TrainConfig(weights=str(first)), CACHE, None)

    assert run_key(TrainConfig(weights=str(second)), CACHE, None) == key
    first.write_bytes(b"new")
    assert run_key(TrainConfig(weights=str(first)), CACHE, None) != key


def test_key_depends_on_the_default_weights_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """DEFAULT may stand for other weights in another version of torchvision, which changes the key."""
    train = TrainConfig(model="mobilenet_v2", weights="DEFAULT")
    key = run_key(train, CACHE, None)

    monkeypatch.setattr("tasks.model.pretrained.default_weights", lambda name: MobileNet_V2_Weights.IMAGENET1K_V1)
    assert run_key(train, CACHE, None) != key


def test_key_does_not_depend_on_the_timeout() -> None:
    """A run that timed out can be resumed with a longer timeout."""
    assert run_key(TrainConfig(timeout_seconds=60), CACHE, None) == run_key(TrainConfig(), CACHE, None)


def test_ranks_that_cannot_use_gpus_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Horovod has no NCCL, auto is the CPU, and cuda is rejected."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("auto", 1, WrongInput("no NCCL")) == torch.device("cpu")
    with pytest.raises(WrongInput, match="train.device is 'cuda', but no NCCL; or set it to auto or cpu"):
        choose_device("cuda", 1, WrongInput("no NCCL"))


def test_device_cpu_is_the_cpu() -> None:
    """The setting cpu selects the CPU, even on a machine with a GPU."""
    assert choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_rejected() -> None:
    """The error has the cause and the alternatives, and auto is the CPU."""
    with pytest.raises(WrongInput, match=r"train\.device is 'cuda' and torch sees no GPU: set it to auto or cpu"):
        choose_device("cuda", 0)
    assert choose_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_optimizer_gets_the_unfrozen_parameters(name: str, kind: type[torch.optim.Optimizer]) -> None:
    """The optimizer has the configured rate and decay, and no frozen parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)

    optimizer = make_optimizer(PhaseTrain(recipe="given", optimizer=name, weight_decay=0.25, learning_rate=0.5), model)

    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in model[1].parameters()]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    if name == "sgd":
        assert group["momentum"] == 0.9
