"""GPUs of this machine for ranks, which no two training runs share, and the backend that fits them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

from tasks.config.distributed import Backend, DistributedConfig
from tasks.errors import WrongInput
from tasks.system.cores import expected_gpu_obstacle, gpu_obstacle, gpus_for, has_nccl
from tasks.system.slots import Gpus, share_of_gpus, take_gpus, take_slot
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")


def choose_backend(spec: TrainingSpec) -> TrainingSpec:
    """Return the specification with the backend that its ranks use and the reason for it, which is logged."""
    settings = spec.distributed
    if settings is None:
        return spec
    backend, reason = fitting_backend(spec.train.device, settings)
    logger.info("the gradients of %d ranks are averaged by %s: %s", spec.num_ranks, backend, reason)
    return spec.model_copy(update={"distributed": settings.with_backend(backend), "backend_reason": reason})


def fitting_backend(device: str, settings: DistributedConfig) -> tuple[Backend, str]:
    """Return the backend of ranks that this machine starts, and the reason for it.

    auto takes Horovod if its build fits the device, else torch. Of ranks on other machines it knows no GPUs but those
    of this one, and assumes that each has one there.

    Args:
        device: `train.device`.
        settings: Settings of the ranks.
    """
    if settings.backend != "auto":
        return settings.backend, f"distributed.backend is '{settings.backend}'"
    is_installed = find_spec("horovod") is not None
    if settings.gradient_compression == "bf16" or not is_installed:
        return "torch", "Horovod cannot send bfloat16" if is_installed else "Horovod is not installed"
    fits: tuple[Backend, str] = "horovod", "its build fits the device"
    if settings.num_ranks == 1 or device == "cpu" or (device == "auto" and not gpus_for(device)):
        return fits

    def obstacle_of(backend: Backend) -> WrongInput | None:
        if settings.launcher == "local":
            return expected_gpu_obstacle(backend, settings.num_ranks)
        return gpu_obstacle(backend, has_nccl(backend), num_ranks=1, num_gpus=1)

    obstacle = obstacle_of("horovod")
    if obstacle is not None and obstacle_of("torch") is None:
        return "torch", obstacle.cause
    return fits if obstacle is None else ("horovod", "no backend can use GPUs here")


def obstacle_here(device: str, settings: DistributedConfig) -> WrongInput | None:
    """Return the reason why ranks that are started on this machine cannot use its GPUs, or None if they can.

    Args:
        device: `train.device`.
        settings: Settings of the ranks.
    """
    if device == "cpu" or settings.launcher != "local":
        return None
    return expected_gpu_obstacle(fitting_backend(device, settings)[0], settings.num_ranks)


def gpus_to_choose_from(device: str, backend: Backend, num_ranks: int) -> list[str]:
    """Return the GPUs of this machine for ranks that take one each; empty where they take none.

    With fewer GPUs than ranks, or without NCCL, the ranks train on the CPU, or refuse `train.device: cuda`.

    Args:
        device: `train.device`.
        backend: `distributed.backend`.
        num_ranks: Number of ranks on this machine.
    """
    names = gpus_for(device)
    if len(names) < num_ranks or (device != "cuda" and expected_gpu_obstacle(backend, num_ranks) is not None):
        return []
    return names


@contextmanager
def gpus_of_run(spec: TrainingSpec, timeout_seconds: float, check: Callable[[], None] = lambda: None) -> Iterator[Gpus]:
    """Yield the GPUs of a training run on this machine: one for each of its ranks, which no other run has.

    A single process has the GPU of its slot, which it shares with other single processes if none is free. Agents
    take those of other hosts.

    Args:
        spec: Specification of the training run.
        timeout_seconds: Maximum time of the wait for other runs, in seconds.
        check: Called during the wait; an exception in it ends the wait.

    Raises:
        WrongInput, TimeLimitExceeded: As `take_gpus` and `take_slot`.
    """
    settings = spec.distributed
    if settings is None:
        names = gpus_for(spec.train.device)
    elif settings.launcher == "local":
        names = gpus_to_choose_from(spec.train.device, settings.decided_backend, spec.num_ranks)
    else:
        names = []
    if not names:
        yield Gpus()
    elif settings is not None:
        with take_gpus(names, spec.num_ranks, timeout_seconds, check) as own:
            yield own
    else:
        with nullcontext(spec.slot) if spec.slot is not None else take_slot(names, timeout_seconds, check) as slot:
            yield share_of_gpus(slot)
