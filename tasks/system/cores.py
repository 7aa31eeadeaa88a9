"""What of a machine a process may use: cores, memory, GPUs by name, and a slot among the trainings that run at once."""

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
"""Quota and period of a container's control group, in microseconds (Linux's cgroup v2 documentation). A machine has no
such file at the root of its own groups."""


MEMORY_GROUP = Path("/sys/fs/cgroup")
"""Where a container's control group says how much memory it may have (memory.max), has (memory.current), and of which
kind (memory.stat), in bytes; the same documentation."""


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


def free_memory() -> int:
    """Return the bytes of memory that this process may still take: the machine's, and no more than its container's.

    What files have left in the container's memory, and nothing has read again, is given up for it.
    """
    free = psutil.virtual_memory().available
    try:
        most = (MEMORY_GROUP / "memory.max").read_text().strip()
        taken = int((MEMORY_GROUP / "memory.current").read_text())
        kinds = dict(line.split() for line in (MEMORY_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return free if most == "max" else min(free, max(0, int(most) - taken + int(kinds["inactive_file"])))


def gpu_names() -> list[str]:
    """Return the GPUs that this process may use, by names that $CUDA_VISIBLE_DEVICES takes."""
    import torch  # Here: who asks for cores need not load it.

    return visible_gpus() or [str(number) for number in range(torch.cuda.device_count())]


def share_of_gpus(slot: int) -> dict[str, str]:
    """Return the environment in which a process sees one of this machine's GPUs, by turns; empty where there is none.

    Args:
        slot: Number of the process among those that run at once, from 0.
    """
    names = gpu_names()
    return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]} if names else {}


def slots_folder() -> Path:
    """Return the folder of the slots' locks: this machine's, and not on a disk that it shares with others."""
    return Path(tempfile.gettempdir()) / f"lakevision-slots-{os.getuid()}"


@contextmanager
def take_slot(gpus: Sequence[str]) -> Iterator[int]:
    """Have the first free slot of this machine until the block ends, by a lock that ends with its process.

    Nobody waits: where each GPU has a training, the first of them gets a second one. How many there may be at once is
    for the work pool to say.

    Args:
        gpus: Those to choose from, as `gpu_names`; empty: a training on the CPU.

    Yields:
        The slot's number, for `share_of_gpus`: slots before it are taken.

    Raises:
        WrongInput: The folder of the locks is somebody else's.
    """
    folder, names = slots_folder(), [f"gpu-{name.replace('/', '-')}" for name in gpus] or ["cpu"]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise WrongInput(f"'{folder}' belongs to another user: remove it, or set TMPDIR to a folder of your own")
    for slot in itertools.count():
        turn, number = divmod(slot, len(names))
        # By the GPU's name: two workers that see other GPUs each take their own.
        lock = filelock.FileLock(folder / f"{names[number]}.{turn}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue
        try:
            yield slot
        finally:
            lock.release()
        return
