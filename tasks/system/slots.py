"""Slots of concurrent training runs on this machine, and the GPUs of their processes, by locks that end with them."""

import glob
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock

from tasks.errors import TimeLimitExceeded, WrongInput
from tasks.system.cores import gpu_names, gpu_uuid

logger = logging.getLogger("lakevision.ranks")

EXCLUSIVE = "exclusive"
"""Name of the lock of a GPU that belongs to a rank, in place of the number of a run that may share the GPU."""

POLL_SECONDS = 0.5
"""Seconds between two attempts to get GPUs."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a training run; by default none.

    Attributes:
        names: Their names.
        locks: File descriptors of their locks. Processes on the GPUs inherit them, so that a GPU is in use until the
            last one has ended, also after a kill of their launcher.
    """

    names: tuple[str, ...] = ()
    locks: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with the GPUs, for processes on them."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.names)} if self.names else {}


@dataclass(frozen=True)
class Slot:
    """A slot of a training run.

    Attributes:
        number: Its number among the concurrent ones, from 0, for `share_of_gpus`.
        lock: File descriptor of its lock, which the process on the slot's GPU inherits, as in `Gpus`.
    """

    number: int
    lock: int


def share_of_gpus(slot: Slot) -> Gpus:
    """Return the GPU of a slot, assigned round-robin; none on a machine without GPUs."""
    names = gpu_names()
    return Gpus((names[slot.number % len(names)],), (slot.lock,)) if names else Gpus()


def slots_folder() -> Path:
    """Return the folder of the slots' lock files, which is local to this machine and not on a shared disk."""
    return Path(tempfile.gettempdir()) / f"lakevision-slots-{os.getuid()}"


@contextmanager
def take_slot(
    gpus: Sequence[str], timeout_seconds: float = math.inf, check: Callable[[], None] = lambda: None
) -> Iterator[Slot]:
    """Acquire the first free slot of this machine for the duration of the block, by a lock that its processes inherit.

    If every GPU has a training run, the first one of a single process gets a second one: the work pool limits the
    number of concurrent runs. GPUs of ranks are never shared (`take_gpus`): while ranks have them all, this waits.

    Args:
        gpus: GPUs to choose from, as `gpu_names`; empty: a training run on the CPU.
        timeout_seconds: Maximum time of the wait, in seconds.
        check: Called during the wait; an exception in it ends the wait.

    Yields:
        The slot: all lower ones are in use, or belong to ranks.

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
) -> Iterator[Gpus]:
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
        The GPUs.

    Raises:
        WrongInput: The folder of the locks belongs to another user.
        TimeLimitExceeded: Other training runs had the GPUs for `timeout_seconds`.
    """
    assert num_ranks <= len(gpus), "a rank has a GPU of its own"
    with ExitStack() as held:
        wanted = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        yield _wait_for(lambda: _free_gpus(gpus, num_ranks, held), wanted, len(gpus), timeout_seconds, check)


def try_to_take_gpus(gpus: Sequence[str], num_ranks: int, held: ExitStack) -> Gpus | None:
    """Acquire GPUs as `take_gpus`, without a wait.

    Args:
        gpus: GPUs to choose from, as `gpu_names`.
        num_ranks: Number of ranks, at most that of the GPUs.
        held: Releases the GPUs at its end.

    Returns:
        The GPUs; None if other training runs have too many of them.

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
        raise WrongInput(
            f"'{folder}' belongs to another user", way_out="remove it, or set TMPDIR to a folder of your own"
        )
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
            logger.info(
                "waiting for %s of %d on this machine, which other training runs, or ranks that have not ended, use",
                wanted,
                num_gpus,
            )
        if time.monotonic() > deadline:
            raise TimeLimitExceeded(
                "other training runs on this machine, or ranks that have not ended, have used its GPUs for "
                f"{timeout_seconds:.0f} s, and this one needs {wanted} of {num_gpus}",
                setting="distributed.num_ranks",
                way_out="wait until they end, lower distributed.num_ranks, or limit the concurrent runs of the work "
                "pool",
            )
        check()
        time.sleep(POLL_SECONDS)


def _lock_name(gpu: str) -> str:
    # By UUID: two workers may name one GPU differently.
    return f"gpu-{gpu_uuid(gpu).replace('/', '-')}"


def _is_free(path: Path) -> bool:
    """Return whether nobody holds a lock; the caller holds the lock of all slots."""
    with ExitStack() as held:
        lock = _try_to_hold(path, held)
        if lock is not None:
            # Unlocked explicitly: a copy in a process that another thread starts at this moment would still hold it.
            filelock.unlock_descriptor(lock)
        return lock is not None


def _try_to_hold(path: Path, held: ExitStack) -> int | None:
    """Acquire a lock until the end of `held`, and return its file descriptor; None if it is held already.

    By descriptor: those that other processes have inherited hold the lock longer than this one, until they end. So it
    is closed and not unlocked, which would free the lock for all.
    """
    with ExitStack() as opened:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        opened.callback(os.close, descriptor)
        if not filelock.lock_descriptor(descriptor, blocking=False):
            return None
        held.enter_context(opened.pop_all())
    return descriptor


def _first_slot(names: Sequence[str], held: ExitStack) -> Slot | None:
    """Acquire the first free slot; return None if all GPUs belong to ranks."""
    folder = slots_folder()
    shared = [number for number, name in enumerate(names) if _is_free(folder / f"{name}.{EXCLUSIVE}.lock")]
    for num_sharing in itertools.count() if shared else ():
        for number in shared:
            # By the GPU's name, so that workers with different visible GPUs use their own.
            lock = _try_to_hold(folder / f"{names[number]}.{num_sharing}.lock", held)
            if lock is not None:
                return Slot(num_sharing * len(names) + number, lock)
    return None


def _free_gpus(gpus: Sequence[str], num_ranks: int, held: ExitStack) -> Gpus | None:
    """Acquire the first GPUs that no run has; return None if there are too few."""
    folder = slots_folder()
    free = [gpu for gpu in gpus if all(map(_is_free, folder.glob(f"{glob.escape(_lock_name(gpu))}.*.lock")))]
    if len(free) < num_ranks:
        return None
    names = tuple(free[:num_ranks])
    found = [_try_to_hold(folder / f"{_lock_name(gpu)}.{EXCLUSIVE}.lock", held) for gpu in names]
    locks = tuple(lock for lock in found if lock is not None)
    assert len(locks) == num_ranks, "the lock of all slots is held"
    return Gpus(names, locks)
