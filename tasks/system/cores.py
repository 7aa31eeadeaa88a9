"""Resources that a process may use: cores, memory, GPUs by name, and slots of concurrent training runs."""

import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import filelock
import psutil

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


def gpu_names() -> list[str]:
    """Return the GPUs that this process may use, by the names that $CUDA_VISIBLE_DEVICES accepts."""
    import torch  # Here: callers that need only the cores do not load it.

    return visible_gpus() or [str(number) for number in range(torch.cuda.device_count())]


def share_of_gpus(slot: int) -> dict[str, str]:
    """Return the environment that restricts a process to one GPU, assigned round-robin; empty without GPUs.

    Args:
        slot: Number of the process among the concurrent ones, from 0.
    """
    names = gpu_names()
    return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]} if names else {}


def slots_folder() -> Path:
    """Return the folder of the slots' lock files, which is local to this machine and not on a shared disk."""
    return Path(tempfile.gettempdir()) / f"lakevision-slots-{os.getuid()}"


@contextmanager
def take_slot(gpus: Sequence[str]) -> Iterator[int]:
    """Acquire the first free slot of this machine for the duration of the block, by a lock that ends with its process.

    It never waits: if every GPU has a training run, the first GPU gets a second one. The work pool limits the number of
    concurrent runs.

    Args:
        gpus: GPUs to choose from, as `gpu_names`; empty: a training run on the CPU.

    Yields:
        The slot's number, for `share_of_gpus`: all lower slots are in use.

    Raises:
        WrongInput: The folder of the locks belongs to another user.
    """
    folder, names = slots_folder(), [f"gpu-{name.replace('/', '-')}" for name in gpus] or ["cpu"]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise WrongInput(f"'{folder}' belongs to another user: remove it, or set TMPDIR to a folder of your own")
    for slot in itertools.count():
        num_shared, number = divmod(slot, len(names))
        # By the GPU's name, so that workers with different visible GPUs use their own.
        lock = filelock.FileLock(folder / f"{names[number]}.{num_shared}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue
        try:
            yield slot
        finally:
            lock.release()
        return
