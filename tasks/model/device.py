"""The device of a training run, its determinism, and the construction of its optimizer."""

import logging
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tasks.collectives.reducer import Reducer, broadcast_value, gather_numbers
from tasks.config.recipe import PhaseTrain
from tasks.environment import cxx_compiler
from tasks.errors import WrongInput, join_names

logger = logging.getLogger("lakevision.train")

CPU_INFO = Path("/proc/cpuinfo")
"""Description of each core on Linux, with a `model name` on x86 (proc_cpuinfo(5))."""


def choose_device(wanted: str, local_rank: int, gpu_obstacle: WrongInput | None = None) -> torch.device:
    """Return the device to train on.

    Args:
        wanted: auto, cpu or cuda.
        local_rank: Number of this rank among those of its machine.
        gpu_obstacle: Reason why the ranks cannot use GPUs, or None if they can.

    Raises:
        WrongInput: CUDA is requested, and is not available or cannot be used by the ranks.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise WrongInput(
            "train.device is 'cuda' and torch sees no GPU",
            setting="train.device",
            way_out="set it to auto or cpu, or install a driver",
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if gpu_obstacle is not None:
        if wanted == "cuda":
            or_else = "; or set it to auto or cpu"
            raise WrongInput.complete(
                f"train.device is 'cuda', but {gpu_obstacle}{or_else}",
                setting="train.device",
                way_out=f"{gpu_obstacle.way_out}{or_else}",
            )
        logger.warning("the ranks train on the CPU: %s", gpu_obstacle)
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def take_device(wanted: str, local_rank: int, reducer: Reducer) -> torch.device:
    """Return the device of this rank, which becomes torch's current one; a collective operation.

    Its tensors are on the CPU: a rank without a GPU, whose driver is broken, would wait for the NCCL of the others.

    Args:
        wanted: auto, cpu or cuda.
        local_rank: Number of this rank among those of its machine.
        reducer: The ranks.

    Raises:
        WrongInput: As `choose_device`; or some of the ranks can train on a GPU, and the others cannot.
    """
    has_gpu = wanted != "cpu" and torch.cuda.is_available() and reducer.gpu_obstacle is None
    without = (gather_numbers(reducer, has_gpu) == 0).nonzero().flatten().tolist()
    if 0 < len(without) < reducer.num_ranks:
        reason = "torch sees no GPU" if reducer.gpu_obstacle is None else reducer.gpu_obstacle.cause
        own = f"on host '{platform.node()}', where {reason}"
        where = broadcast_value(reducer, TypeAdapter(str), own, without[0])
        names = join_names([f"rank {rank}" for rank in without[:3]], len(without))
        raise WrongInput(
            f"{names} cannot train on a GPU, and the others can; rank {without[0]} is {where}",
            setting="train.device",
            way_out="correct the driver there, train on other hosts, or set train.device to cpu",
        )
    device = choose_device(wanted, local_rank, reducer.gpu_obstacle)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Else libraries also take memory of the machine's first GPU.
    return device


def check_compiler() -> None:
    """Check that there is a C++ compiler, which torch.compile needs on a CPU.

    Raises:
        WrongInput: There is none.
    """
    compiler = cxx_compiler()
    if shutil.which(compiler) is None:
        raise WrongInput(
            f"train.compile is true, which needs a C++ compiler on a CPU, and '{compiler}' was not found",
            setting="train.compile",
            way_out="install g++, set $CXX to another compiler, or set train.compile to false",
        )


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU of a device: rounding may differ between models."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    # The name alone may be the generic one of a virtual machine: "AMD EPYC".
    return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"


def make_deterministic(device: torch.device) -> None:
    """Configure CUDA for deterministic training runs; CPU kernels are deterministic already.

    If CUDA has no deterministic kernel for an operation, torch warns and uses another one: a run that is not
    reproducible is better than none. An environment variable configures cuBLAS (`rank_environment`).
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # It selects the kernel that was fastest just now, not always the same.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else torch fills each new tensor with NaN, to reveal reads of uninitialized memory: a needless pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of its class


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": partial(SGD, momentum=0.9)}
"""Optimizers, by the setting `train.optimizer`."""


RATE_FRACTION = "rate_fraction"
"""Entry of a parameter group: the fraction of the learning rate that its layers have."""


def make_optimizer(train: PhaseTrain, model: nn.Module) -> Optimizer:
    """Return the optimizer of the parameters that are not frozen, with the initial learning rate of the phase."""
    # Fused: one pass over each parameter instead of one per term of the formula.
    create = partial(OPTIMIZERS[train.optimizer], lr=train.learning_rate, weight_decay=train.weight_decay, fused=True)
    if train.recipe == "given":
        return create([parameter for parameter in model.parameters() if parameter.requires_grad])
    return create(parameter_groups(train, model))


def parameter_groups(train: PhaseTrain, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of the trained parameters by learning rate and weight decay.

    Norms and biases, which have one dimension, do not decay, as in torchvision's references (`set_weight_decay` with
    `--norm-weight-decay 0`). Layer l of L has layer_decay^(1 - l / (L - 1)) of the rate of the last one. This follows
    Howard and Ruder, "Universal Language Model Fine-tuning" (2018), section 3.2. A layer is a module with parameters.
    """
    layers = [[*module.parameters(recurse=False)] for module in model.modules()]
    trained = [[value for value in layer if value.requires_grad] for layer in layers if layer]
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for number, layer in enumerate(trained):
        depth = number / (len(trained) - 1) if len(trained) > 1 else 1.0
        fraction = train.layer_decay ** (1 - depth)
        for value in layer:
            groups.setdefault((fraction, value.ndim > 1), []).append(value)
    return [
        {"params": values, RATE_FRACTION: fraction, **({} if decays else {"weight_decay": 0.0})}
        for (fraction, decays), values in groups.items()
    ]
