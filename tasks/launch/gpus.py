"""GPUs of the ranks on this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.config.distributed import DistributedConfig
from tasks.launch.gpu_obstacle import expected_gpu_obstacle
from tasks.system.cores import gpu_names, share_of_gpus, take_gpus
from tasks.train.spec import TrainingSpec


@contextmanager
def gpus_of_run(
    spec: TrainingSpec, timeout_seconds: float, check: Callable[[], None] = lambda: None
) -> Iterator[dict[str, str]]:
    """Yield the environment with the GPUs of a training run: one for each of its ranks, which no other run has.

    A single process keeps the GPU of its slot, or sees all. Ranks on other hosts see all GPUs of theirs. With fewer
    GPUs than ranks, or without NCCL, nothing is acquired: the ranks train on the CPU, or refuse `train.device: cuda`.

    Args:
        spec: Specification of the training run.
        timeout_seconds: Maximum time of the wait for other runs, in seconds.
        check: Called during the wait; an exception in it ends the wait.

    Raises:
        WrongInput, TimeLimitExceeded: As `take_gpus`.
    """
    if spec.distributed is None:
        yield share_of_gpus(spec.slot) if spec.num_slots > 1 else {}
        return
    if spec.distributed.launcher != "local":
        yield {}
        return
    names = [] if spec.train.device == "cpu" else gpu_names()
    if len(names) < spec.num_ranks or (spec.train.device != "cuda" and _trains_on_cpu(spec.distributed)):
        yield {}
        return
    with take_gpus(names, spec.num_ranks, timeout_seconds, check) as own:
        yield {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _trains_on_cpu(distributed: DistributedConfig) -> bool:
    """Return whether ranks with `train.device: auto` cannot use the GPUs, such as without NCCL."""
    return expected_gpu_obstacle(distributed.backend, distributed.num_ranks) is not None
