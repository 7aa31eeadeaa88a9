"""GPUs of this machine for ranks, which no two training runs share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.config.distributed import Backend
from tasks.system.cores import expected_gpu_obstacle, gpus_for
from tasks.system.slots import Gpus, share_of_gpus, take_gpus, take_slot
from tasks.train.spec import TrainingSpec


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
        names = gpus_to_choose_from(spec.train.device, settings.backend, spec.num_ranks)
    else:
        names = []
    if not names:
        yield Gpus()
    elif settings is not None:
        with take_gpus(names, spec.num_ranks, timeout_seconds, check) as own:
            yield own
    elif spec.slot is not None:
        yield share_of_gpus(spec.slot)
    else:
        with take_slot(names, timeout_seconds, check) as slot:
            yield share_of_gpus(slot)
