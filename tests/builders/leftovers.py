"""Processes, ports and shared memory that a training run may leave on this machine after a cancellation or a kill."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

LIMIT_SECONDS = 15.0
"""Time after a cancellation or a kill within which nothing may be left."""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def ports_of(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the ports on which processes listen; those that have ended listen on none."""
    ports = set()
    for process in processes:
        with suppress(psutil.Error):
            ports.update(
                connection.laddr.port
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            )
    return ports


def listening(ports: set[int]) -> set[int]:
    """Return those of the ports on which any process of this machine listens."""
    found = psutil.net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port in ports}


def shared_memory() -> set[str]:
    """Return the names of the files in shared memory."""
    return set(os.listdir("/dev/shm"))


class Leftovers:
    """Processes that are about to be ended, the ports on which they listen, and the files in shared memory before."""

    def __init__(self) -> None:
        """Note the files in shared memory; create it before the processes start."""
        self._files = shared_memory()
        self._processes: set[psutil.Process] = set()
        self._ports: set[int] = set()

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Note running processes and their ports."""
        noted = set(processes)
        self._processes |= noted
        self._ports |= ports_of(noted)

    def assert_none(self, since: float, *, processes_here: bool = True) -> float:
        """Wait until nothing is left, at most until LIMIT_SECONDS after a moment; return the seconds since then.

        Args:
            since: The moment of the cancellation or kill, on the monotonic clock.
            processes_here: Whether a noted process must have been there, as is the case unless the run had ended.
        """
        assert self._processes or not processes_here, "no process was noted"
        while (found := self._found()) and time.monotonic() < since + LIMIT_SECONDS:
            time.sleep(0.1)
        assert found == []
        return time.monotonic() - since

    def _found(self) -> list[str]:
        found = []
        for process in self._processes:
            if is_alive(process):
                with suppress(psutil.Error):
                    found.append(f"process {process.pid} {' '.join(process.cmdline())}")
        found += [f"port {port}" for port in sorted(listening(self._ports))]
        return found + [f"/dev/shm/{name}" for name in sorted(shared_memory() - self._files)]
