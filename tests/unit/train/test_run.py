"""What decides a training: its key, device, optimizer and learning rate."""

import pytest
import torch
from torch import nn

from tasks.config import DistributedConfig, TrainConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef
from tasks.train.run import choose_device, make_optimizer, run_key

CACHE = CacheRef(url="/caches/a", digest="d" * 64)


def test_same_training_has_the_same_key_wherever_the_cache_lies() -> None:
    """The key names content: a cache that was moved, or another pool to run in, changes no result."""
    key = run_key(TrainConfig(), CACHE, DistributedConfig())

    assert run_key(TrainConfig(), CACHE.model_copy(update={"url": "/b"}), DistributedConfig()) == key
    assert run_key(TrainConfig(), CACHE, DistributedConfig(work_pool="other", where="in_place")) == key


def test_whatever_decides_the_result_is_in_the_key() -> None:
    """Seed, cache, number of ranks, and whether there are ranks at all, are each another training."""
    keys = {
        run_key(TrainConfig(), CACHE, None),
        run_key(TrainConfig(seed=2), CACHE, None),
        run_key(TrainConfig(batch_size=8), CACHE, None),
        run_key(TrainConfig(), CacheRef(url="/caches/a", digest="e" * 64), None),
        run_key(TrainConfig(), CACHE, DistributedConfig(num_ranks=2)),
        run_key(TrainConfig(), CACHE, DistributedConfig(num_ranks=3)),
        run_key(TrainConfig(), CACHE, DistributedConfig(num_ranks=3, warmup_epochs=2.0)),
    }

    assert len(keys) == 7


def test_cpu_is_chosen_when_it_is_asked_for() -> None:
    """Also on a machine with a GPU."""
    assert choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    """The sentence says what torch sees and what to set; auto takes the CPU."""
    with pytest.raises(WrongInput, match=r"train\.device is 'cuda' and torch sees no GPU: set it to auto or cpu"):
        choose_device("cuda", 0)
    assert choose_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_optimizer_gets_what_is_not_frozen(name: str, kind: type[torch.optim.Optimizer]) -> None:
    """Rate and decay are the configured ones, and frozen parameters are not handed over."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)

    optimizer = make_optimizer(TrainConfig(optimizer=name, learning_rate=0.5, weight_decay=0.25), model)

    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in model[1].parameters()]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    if name == "sgd":
        assert group["momentum"] == 0.9
