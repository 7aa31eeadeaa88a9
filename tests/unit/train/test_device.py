"""What a training asks of its device."""

from typing import Any

import pytest
import torch

from tasks.train.device import make_deterministic


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch was asked for, in place of being set."""
    found: dict[str, Any] = {}

    class Kept:
        def __init__(self, name: str) -> None:
            object.__setattr__(self, "name", name)

        def __setattr__(self, attribute: str, value: object) -> None:
            found[f"{self.name}.{attribute}"] = value  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.backends, "cudnn", Kept("cudnn"))
    monkeypatch.setattr(torch.utils, "deterministic", Kept("deterministic"))
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, *, warn_only: found.update(algorithms=(mode, warn_only))
    )
    return found


def test_a_gpu_is_asked_for_the_same_result_each_time(asked: dict[str, Any]) -> None:
    """Where it can: what has no such kernel is warned of, and new memory is not filled for it."""
    make_deterministic(torch.device("cuda", 1))

    assert asked == {
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "algorithms": (True, True),
        "deterministic.fill_uninitialized_memory": False,
    }


def test_a_cpu_is_asked_for_nothing(asked: dict[str, Any]) -> None:
    """Its kernels give the same result anyway."""
    make_deterministic(torch.device("cpu"))

    assert asked == {}
