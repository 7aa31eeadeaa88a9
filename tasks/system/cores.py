"""Resources that a process may use: cores, memory, GPUs by name, and why ranks cannot exchange gradients on them."""

import math
import os
from pathlib import Path

import psutil

from tasks.config.distributed import Backend
from tasks.environment import visible_gpus
from tasks.errors import WrongInput

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period of a container's control group, in microseconds (Linux's cgroup v2 documentation). The root group of
a machine has no such file."""


MEMORY_GROUP = Path("/sys/fs/cgroup")
"""Folder of a container's control group with the limit (memory.max), usage (memory.current) and kinds (memory.stat) of
its memory, in bytes; see the same documentation."""


def num_cores() -> int:
    """Return the number of cores that this process may use: those in its affinity mask, up to its container's quota.

    A container with a quota of two cores on a machine of 64 gets two: 64 threads would mostly wait for the next period.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def free_memory() -> int:
    """Return the memory that this process may still allocate, in bytes: the machine's, up to its container's limit.

    The container's inactive page cache counts as free, since the kernel reclaims it.
    """
    free = psutil.virtual_memory().available
    try:
        limit = (MEMORY_GROUP / "memory.max").read_text().strip()
        usage = int((MEMORY_GROUP / "memory.current").read_text())
        kinds = dict(line.split() for line in (MEMORY_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - usage + int(kinds["inactive_file"])))


DEVICES = Path("/dev")
"""Folder of the device files."""

GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of GPUs: by NVIDIA's driver, by AMD's, and under Windows."""


def gpu_names() -> list[str]:
    """Return the GPUs that this process may use, by the names that $CUDA_VISIBLE_DEVICES accepts."""
    if named := visible_gpus():
        return named
    if not _has_gpu_files():
        return []
    import torch  # Here: a machine without GPUs does not load it.

    return [str(number) for number in range(torch.cuda.device_count())]


def gpu_uuid(name: str) -> str:
    """Return the UUID of a GPU by its name in `gpu_names`: its number, its UUID, or the beginning of that.

    A name stays as it is if torch sees no such GPU, and for a part of a GPU, whose UUID may be that of the whole.
    """
    if name.startswith("MIG") or not _has_gpu_files():
        return name
    import torch

    if not torch.cuda.is_available():
        return name
    # torch numbers the GPUs in this order.
    numbers = {known: number for number, known in enumerate(gpu_names()[: torch.cuda.device_count()])}
    return str(torch.cuda.get_device_properties(numbers[name]).uuid) if name in numbers else name


def _has_gpu_files() -> bool:
    return any(next(DEVICES.glob(pattern), None) for pattern in GPU_FILES)


def gpus_for(device: str) -> list[str]:
    """Return the GPUs that a training run with this `train.device` may use: none for `cpu`, else `gpu_names`."""
    return [] if device == "cpu" else gpu_names()


def gpu_obstacle(backend: Backend, has_nccl: bool, num_ranks: int, num_gpus: int) -> WrongInput | None:
    """Return the reason why ranks on this machine cannot exchange gradients on GPUs, with the way out, or None.

    Args:
        backend: Library that exchanges the gradients.
        has_nccl: Whether it was built with NCCL; without it, a rank with tensors on a GPU fails.
        num_ranks: Ranks on this machine.
        num_gpus: GPUs that torch sees; NCCL does not support two ranks on one GPU.
    """
    if not has_nccl and backend == "horovod":
        return WrongInput(
            "Horovod was built without NCCL",
            way_out="run 'HOROVOD_GPU_OPERATIONS=NCCL make setup', or set distributed.backend to torch",
        )
    if not has_nccl:
        return WrongInput("torch was built without NCCL", way_out="install its build for CUDA")
    if num_ranks > num_gpus:
        return WrongInput(
            f"{num_ranks} ranks share this machine and there are {num_gpus} GPUs", way_out="give at most as many ranks"
        )
    return None


def expected_gpu_obstacle(backend: Backend, num_ranks: int) -> WrongInput | None:
    """Return the obstacle of ranks that would be started on this machine now, or None without a GPU."""
    import torch

    if num_ranks == 1 or not torch.cuda.is_available():
        return None
    return gpu_obstacle(backend, has_nccl(backend), num_ranks, torch.cuda.device_count())


def has_nccl(backend: Backend) -> bool:
    """Return whether a backend was built with NCCL."""
    import torch

    if backend == "torch":
        return torch.distributed.is_nccl_available()
    import horovod.torch as hvd  # Here: it takes seconds to load. `nccl_built` needs no other ranks.

    return bool(hvd.nccl_built())
