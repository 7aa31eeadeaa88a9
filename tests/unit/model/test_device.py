"""The device of a training run: determinism and name of the processor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.errors import WrongInput
from tasks.model import device
from tasks.model.device import make_deterministic, processor_name, take_device
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer


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


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let torch see two GPUs, and record which ones become the current one of a rank."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def take(wanted: str, obstacles: dict[int, WrongInput]) -> list[torch.device]:
    """Return the devices that four ranks take, two on each machine, of which some cannot use their GPU."""

    def rank_main(reducer: ThreadReducer) -> torch.device:
        reducer.gpu_obstacle = obstacles.get(reducer.rank)
        return take_device(wanted, reducer.rank % 2, reducer)

    return ThreadRanks(4).run(rank_main)


def test_each_rank_makes_its_gpu_the_current_one(current: list[torch.device]) -> None:
    """Libraries that take the current GPU do not take that of another rank."""
    assert take("auto", {}) == [torch.device("cuda", number) for number in (0, 1, 0, 1)]
    assert sorted(found.index for found in current) == [0, 0, 1, 1]
    current.clear()
    assert take("cpu", {}) == [torch.device("cpu")] * 4
    assert current == []


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_ranks_that_cannot_use_a_gpu_are_named(wanted: str) -> None:
    """The others would wait for them in NCCL; where no rank can use one, all train on the CPU."""
    broken = WrongInput("Horovod was built without NCCL", way_out="build it")
    expected = (
        r"^rank 2, rank 3 cannot train on a GPU, and the others can; rank 2 is on host '.+', where Horovod was built "
        r"without NCCL: correct the driver there, .* or set train\.device to cpu$"
    )
    with pytest.raises(WrongInput, match=expected):
        take(wanted, {2: broken, 3: broken})

    everywhere = dict.fromkeys(range(4), broken)
    if wanted == "auto":
        assert take(wanted, everywhere) == [torch.device("cpu")] * 4
    else:
        with pytest.raises(WrongInput, match="is 'cuda', but Horovod was built without NCCL"):
            take(wanted, everywhere)


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
