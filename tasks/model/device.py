"""What a training runs on: the device, and the optimizer in its fused form there."""

import logging
import platform
from pathlib import Path

import torch
from torch import nn

from tasks.config.train import TrainConfig
from tasks.errors import WrongInput

logger = logging.getLogger("lakevision.train")

CPU_INFO = Path("/proc/cpuinfo")
"""What Linux says of each core, a `model name` among it on x86 (proc_cpuinfo(5))."""


def choose_device(wanted: str, local_rank: int, gpu_obstacle: str | None = None) -> torch.device:
    """Return the device to train on.

    Args:
        wanted: auto, cpu or cuda.
        local_rank: This rank among those of its machine.
        gpu_obstacle: Why the ranks cannot use GPUs, where they cannot.

    Raises:
        WrongInput: CUDA is asked for and absent, or the ranks cannot use it.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise WrongInput("train.device is 'cuda' and torch sees no GPU: set it to auto or cpu, or install a driver")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if gpu_obstacle is not None:
        if wanted == "cuda":
            raise WrongInput(f"train.device is 'cuda', but {gpu_obstacle}; or set it to auto or cpu")
        logger.warning("the ranks train on the CPU: %s", gpu_obstacle)
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU that computes: another one may round sums another way."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    # The name alone may be that of a virtual machine's maker: "AMD EPYC".
    return f"{said['model name']} (family {said.get('cpu family')}, model {said.get('model')})"


def make_deterministic(device: torch.device) -> None:
    """Ask for the same result of the same training each time; a CPU gives it without being asked.

    Where CUDA has no such kernel for an operation torch warns and takes the other: a training that is not repeated to
    the last bit is better than none. cuBLAS is asked by a variable (`rank_environment`).
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # It takes what was fastest just now, another kernel each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else torch fills each new tensor with NaN, to show who reads what nobody wrote: a pass over memory for nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of its class


def make_optimizer(train: TrainConfig, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return the optimizer over the parameters that are not frozen, with its first learning rate."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = train.weight_decay
    # Fused: one pass over each parameter instead of one a term of the formula.
    if train.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=True)
    if train.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, momentum=0.9, fused=True)
