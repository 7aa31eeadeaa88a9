"""What of a machine a process may use: cores, and GPUs by name."""

import math
import os
from pathlib import Path

from tasks.environment import visible_gpus

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period of a container's control group, in microseconds (Linux's cgroup v2 documentation). A machine has no
such file at the root of its own groups."""


def num_cores() -> int:
    """Return the cores this process may use: those it is bound to, and no more than its container's quota.

    A container of two cores' time on a machine of 64 has two: with 64 threads it would mostly wait for its next period.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def share_of_gpus(slot: int) -> dict[str, str]:
    """Return the environment in which a process sees one of this machine's GPUs, by turns; empty where there is none.

    Args:
        slot: Number of the process among those that run at once, from 0.
    """
    import torch  # Here: who asks for cores need not load it.

    names = visible_gpus() or [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]} if names else {}
