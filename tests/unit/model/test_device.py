"""The device of a training run: determinism and name of the processor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.model import device
from tasks.model.device import make_deterministic, processor_name


@pytest.fixture
def torch_flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return flags of torch, recorded instead of set."""
    found: dict[str, Any] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            object.__setattr__(self, "name", name)

        def __setattr__(self, attribute: str, value: object) -> None:
            found[f"{self.name}.{attribute}"] = value  # type: ignore[attr-defined]  # an attribute of the fake

    monkeypatch.setattr(torch.backends, "cudnn", Recorder("cudnn"))
    monkeypatch.setattr(torch.utils, "deterministic", Recorder("deterministic"))
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, *, warn_only: found.update(algorithms=(mode, warn_only))
    )
    return found


def test_gpu_is_configured_to_be_deterministic(torch_flags: dict[str, Any]) -> None:
    """On a GPU, deterministic kernels are requested with warnings only, and new memory is not filled."""
    make_deterministic(torch.device("cuda", 1))

    assert torch_flags == {
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "algorithms": (True, True),
        "deterministic.fill_uninitialized_memory": False,
    }


def test_cpu_needs_no_configuration(torch_flags: dict[str, Any]) -> None:
    """On a CPU no flag is set, as its kernels are deterministic."""
    make_deterministic(torch.device("cpu"))

    assert torch_flags == {}


def test_cpu_name_includes_family_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is named with its family and model, as generic names repeat; without a name, by its architecture."""
    cpu = torch.device("cpu")
    assert processor_name(cpu) == processor_name(cpu) != ""

    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(device, "CPU_INFO", info)
    core = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
    info.write_text(core.format(0) + core.format(1))
    assert processor_name(cpu) == "AMD EPYC (family 25, model 17)"

    info.write_text("processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n")
    architecture = processor_name(cpu)
    info.unlink()
    assert processor_name(cpu) == architecture != ""
