"""Resources that a process may use: cores, memory, GPUs by name, and slots of concurrent training runs."""

import glob
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import filelock
import psutil

from tasks.environment import visible_gpus
from tasks.errors import TimeLimitExceeded, WrongInput

logger = logging.getLogger("lakevision.ranks")

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

EXCLUSIVE = "exclusive"
"""Name of the lock of a GPU that belongs to a rank, in place of the number of a run that may share the GPU."""

POLL_SECONDS = 0.5
"""Seconds between two attempts to get GPUs."""


def gpu_names() -> list[str]:
    """Return the GPUs that this process may use, by the names that $CUDA_VISIBLE_DEVICES accepts."""
    if named := visible_gpus():
        return named
    if not any(next(DEVICES.glob(pattern), None) for pattern in GPU_FILES):
        return []
    import torch  # Here: a machine without GPUs does not load it.

    return [str(number) for number in range(torch.cuda.device_count())]


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
def take_slot(
    gpus: Sequence[str], timeout_seconds: float = math.inf, check: Callable[[], None] = lambda: None
) -> Iterator[int]:
    """Acquire the first free slot of this machine for the duration of the block, by a lock that ends with its process.

    If every GPU has a training run, the first one of a single process gets a second one: the work pool limits the
    number of concurrent runs. GPUs of ranks are never shared (`take_gpus`): while ranks have them all, this waits.

    Args:
        gpus: GPUs to choose from, as `gpu_names`; empty: a training run on the CPU.
        timeout_seconds: Maximum time of the wait, in seconds.
        check: Called during the wait; an exception in it ends the wait.

    Yields:
        The slot's number, for `share_of_gpus`: all lower slots are in use, or belong to ranks.

    Raises:
        WrongInput: The folder of the locks belongs to another user.
        TimeLimitExceeded: Ranks had all GPUs for `timeout_seconds`.
    """
    names = [_lock_name(name) for name in gpus] or ["cpu"]
    with ExitStack() as held:
        yield _wait_for(lambda: _first_slot(names, held), "a GPU", len(gpus), timeout_seconds, check)


@contextmanager
def take_gpus(
    gpus: Sequence[str], num_ranks: int, timeout_seconds: float, check: Callable[[], None] = lambda: None
) -> Iterator[list[str]]:
    """Acquire a GPU for each rank that no other training run on this machine has, for the duration of the block.

    Other runs may end, so this waits for them, as a run waits for a slot of its work pool: NCCL refuses two ranks on
    one GPU, and two runs on one would share its memory. It acquires all GPUs at once or none, so that two runs never
    wait for each other.

    Args:
        gpus: GPUs to choose from, as `gpu_names`.
        num_ranks: Number of ranks, at most that of the GPUs.
        timeout_seconds: Maximum time of the wait, in seconds.
        check: Called during the wait; an exception in it ends the wait.

    Yields:
        The names of the GPUs.

    Raises:
        WrongInput: The folder of the locks belongs to another user.
        TimeLimitExceeded: Other training runs had the GPUs for `timeout_seconds`.
    """
    assert num_ranks <= len(gpus), "a rank has a GPU of its own"
    with ExitStack() as held:
        wanted = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        yield _wait_for(lambda: _free_gpus(gpus, num_ranks, held), wanted, len(gpus), timeout_seconds, check)


def try_to_take_gpus(gpus: Sequence[str], num_ranks: int, held: ExitStack) -> list[str] | None:
    """Acquire GPUs as `take_gpus`, without a wait.

    Args:
        gpus: GPUs to choose from, as `gpu_names`.
        num_ranks: Number of ranks, at most that of the GPUs.
        held: Releases the GPUs at its end.

    Returns:
        The names of the GPUs; None if other training runs have too many of them.

    Raises:
        WrongInput: The folder of the locks belongs to another user.
    """
    return _attempt(lambda: _free_gpus(gpus, num_ranks, held))


T = TypeVar("T")


def _attempt(take: Callable[[], T]) -> T:
    """Call `take` under the lock of all slots."""
    folder = slots_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise WrongInput(f"'{folder}' belongs to another user: remove it, or set TMPDIR to a folder of your own")
    # Held for milliseconds: two processes would find each other's GPUs in use, and both keep waiting.
    with filelock.FileLock(folder / "slots.lock"):
        return take()


def _wait_for(
    take: Callable[[], T | None], wanted: str, num_gpus: int, timeout_seconds: float, check: Callable[[], None]
) -> T:
    """Call `take` under the lock of all slots until it returns a value."""
    deadline, is_logged = time.monotonic() + timeout_seconds, False
    while True:
        taken = _attempt(take)
        if taken is not None:
            return taken
        if not is_logged:
            is_logged = True
            logger.info("waiting for %s of %d on this machine, which other training runs use", wanted, num_gpus)
        if time.monotonic() > deadline:
            raise TimeLimitExceeded(
                f"other training runs on this machine have used its GPUs for {timeout_seconds:.0f} s, and this one "
                f"needs {wanted} of {num_gpus}: wait until they end, lower distributed.num_ranks, or limit the "
                "concurrent runs of the work pool"
            )
        check()
        time.sleep(POLL_SECONDS)


def _lock_name(gpu: str) -> str:
    return f"gpu-{gpu.replace('/', '-')}"


def _is_free(path: Path) -> bool:
    """Return whether nobody holds a lock; the caller holds the lock of all slots."""
    try:
        with filelock.FileLock(path).acquire(timeout=0):
            return True
    except filelock.Timeout:
        return False


def _hold(path: Path, held: ExitStack) -> None:
    lock = filelock.FileLock(path)
    lock.acquire(timeout=0)
    held.callback(lock.release)


def _first_slot(names: Sequence[str], held: ExitStack) -> int | None:
    """Acquire the first free slot; return None if all GPUs belong to ranks."""
    folder = slots_folder()
    shared = [number for number, name in enumerate(names) if _is_free(folder / f"{name}.{EXCLUSIVE}.lock")]
    for num_sharing in itertools.count() if shared else ():
        for number in shared:
            # By the GPU's name, so that workers with different visible GPUs use their own.
            with suppress(filelock.Timeout):
                _hold(folder / f"{names[number]}.{num_sharing}.lock", held)
                return num_sharing * len(names) + number
    return None


def _free_gpus(gpus: Sequence[str], num_ranks: int, held: ExitStack) -> list[str] | None:
    """Acquire the first GPUs that no run has; return None if there are too few."""
    folder = slots_folder()
    free = [gpu for gpu in gpus if all(map(_is_free, folder.glob(f"{glob.escape(_lock_name(gpu))}.*.lock")))]
    if len(free) < num_ranks:
        return None
    for gpu in free[:num_ranks]:
        _hold(folder / f"{_lock_name(gpu)}.{EXCLUSIVE}.lock", held)
    return free[:num_ranks]
