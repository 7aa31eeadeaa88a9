"""What a training asks of its device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.model import device
from tasks.model.device import make_deterministic, processor_name


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


def test_a_cpu_is_named_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of its model, since virtual machines call many alike; where no name is told, by its kind."""
    cpu = torch.device("cpu")
    assert processor_name(cpu) == processor_name(cpu) != ""

    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(device, "CPU_INFO", info)
    core = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
    info.write_text(core.format(0) + core.format(1))
    assert processor_name(cpu) == "AMD EPYC (family 25, model 17)"

    info.write_text("processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n")
    by_kind = processor_name(cpu)
    info.unlink()
    assert processor_name(cpu) == by_kind != ""
