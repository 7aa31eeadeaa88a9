"""Environments of ranks on this machine, as the launcher gives them, for ranks that a test or benchmark starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tasks.collectives.key_value_store import StoreAddress, key_value_store
from tasks.config.distributed import Backend
from tasks.launch.rendezvous import place_ranks, rank_variables


@dataclass
class Loopback:
    """This machine as the place of all ranks."""

    slots: int
    store: StoreAddress | None = None
    host: str = "localhost"
    interface: str = "lo"


@contextmanager
def local_environments(backend: Backend, num_ranks: int, stall_seconds: float) -> Iterator[list[dict[str, str]]]:
    """Run the store of ranks until the end of the block; yield the environment variables of each rank."""
    with key_value_store() as store:
        placements = place_ranks([Loopback(num_ranks, store.address)], num_ranks)
        yield [rank_variables(backend, placement, stall_seconds) for placement in placements]
