"""GPUs of ranks on this machine and on hosts: no two training runs use the same GPU."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasks.config.distributed import Backend
from tasks.launch.gpu_obstacle import expected_gpu_obstacle
from tasks.launch.placement import place_ranks
from tasks.launch.remote import Agent
from tasks.system.cores import gpus_for
from tasks.system.slots import Gpus, share_of_gpus, take_gpus, take_slot
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

POLL_SECONDS = 2.0
"""Seconds between two attempts to get the GPUs of all hosts."""


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

    A single process has the GPU of its slot, which it shares with other single processes if none is free. For ranks on
    other hosts see `take_gpus_of_hosts`.

    Args:
        spec: Specification of the training run.
        timeout_seconds: Maximum time of the wait for other runs, in seconds.
        check: Called during the wait; an exception in it ends the wait.

    Raises:
        WrongInput, TimeLimitExceeded: As `take_gpus` and `take_slot`.
    """
    if spec.distributed is None:
        names = gpus_for(spec.train.device)
        if not names:
            yield Gpus()
        elif spec.slot is not None:
            yield share_of_gpus(spec.slot)
        else:
            with take_slot(names, timeout_seconds, check) as slot:
                yield share_of_gpus(slot)
        return
    if spec.distributed.launcher != "local":
        yield Gpus()
        return
    names = gpus_to_choose_from(spec.train.device, spec.distributed.backend, spec.num_ranks)
    if not names:
        yield Gpus()
        return
    with take_gpus(names, spec.num_ranks, timeout_seconds, check) as own:
        yield own


def take_gpus_of_hosts(spec: TrainingSpec, agents: Sequence[Agent], check: Callable[[], None]) -> None:
    """Acquire a GPU for each rank on each host, in use until its agent and its ranks have ended.

    Waits while other training runs have too many of them. It acquires the GPUs of all hosts or none, so that two runs
    never wait for each other.

    Args:
        spec: Specification of the training run.
        agents: The agents of the hosts.
        check: Called during the wait; an exception in it ends the wait.

    Raises:
        HostLost: The connection to a host ended.
        WrongInput: The folder of the locks belongs to another user there.
    """
    assert spec.distributed is not None, "a single process runs on this machine"
    counts = Counter(one.place for one in place_ranks(agents, spec.num_ranks))
    wanted = {"device": spec.train.device, "backend": spec.distributed.backend}
    is_logged = False
    while True:
        for index, num_ranks in counts.items():
            if not agents[index].ask("take_gpus", num_ranks=num_ranks, **wanted)["are_taken"]:
                missing = agents[index].host
                break
        else:
            return
        for index in counts:
            agents[index].ask("release_gpus")
        if not is_logged:
            is_logged = True
            logger.info(
                "waiting for GPUs of host '%s', which other training runs, or ranks that have not ended, use", missing
            )
        check()
        time.sleep(POLL_SECONDS)
