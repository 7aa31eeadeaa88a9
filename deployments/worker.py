"""A worker of a process pool, which first ends the runs that its predecessor left: worker --pool POOL [OPTIONS]."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise

import psutil
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from deployments.stack.register import wait_for_server
from tasks.environment import PROGRESS_BARS

WORKERS = {"deployments.stack.prefect_worker", "deployments.prefect_worker"}
"""Module of a worker, and its name in release 0.1.0."""


def running_worker(name: str) -> int | None:
    """Return the process id of a worker of this name on this machine, for the same server, or None."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or (), process.info["environ"]  # None if it is another user's
        is_worker = not WORKERS.isdisjoint(words) and ("--name", name) in pairwise(words)
        if is_worker and environment and environment.get("PREFECT_API_URL") == PREFECT_API_URL.value():
            return process.pid
    return None


def main(arguments: Sequence[str]) -> None:
    """End lost runs, and become the worker; other options are passed on to `prefect worker start`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", required=True, help="name of the work pool")
    # The same after a restart, so that the predecessor does not count as another worker for minutes.
    parser.add_argument("--name", help="its name, unique in the pool; by default that of the pool and of the machine")
    options, passed_on = parser.parse_known_args(arguments)
    name = options.name or f"{options.pool}-{socket.gethostname()}"
    if (process := running_worker(name)) is not None:
        # It would not count as another worker, and runs that it has just taken would be ended as lost.
        sys.exit(f"the worker '{name}' runs here already, as process {process}: give another one its own --name")
    environment = {PROGRESS_BARS: "false"} | os.environ
    # Here: the import of MLflow takes seconds, and sets variables, which are not for the worker.
    from deployments.stack.reconcile import end_lost_runs, end_mlflow_runs

    with get_client(sync_client=True) as client:
        wait_for_server(client)
        end_lost_runs(client, options.pool, name)
        end_mlflow_runs(client, options.pool)
    start = ["-m", "deployments.stack.prefect_worker", "--pool", options.pool, "--name", name]
    os.execve(sys.executable, [sys.executable, *start, *passed_on], environment)  # noqa: S606  # no shell: the arguments are given here


if __name__ == "__main__":
    main(sys.argv[1:])
