"""A worker of a process pool, which first ends the runs that its predecessor left: worker --pool POOL [OPTIONS]."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from prefect.client.orchestration import get_client

from deployments.register import wait_for_server


def main(arguments: Sequence[str]) -> None:
    """End lost runs, and become the worker; other options are passed on to `prefect worker start`."""
    environment = dict(os.environ)
    # Here: the import of MLflow sets variables, which are not for the worker.
    from deployments.reconcile import end_lost_runs, end_mlflow_runs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", required=True, help="name of the work pool")
    options, passed_on = parser.parse_known_args(arguments)
    # The same after a restart, so that the predecessor does not count as another worker for minutes.
    name = f"{options.pool}-{socket.gethostname()}"
    with get_client(sync_client=True) as client:
        wait_for_server(client)
        end_lost_runs(client, options.pool, name)
        end_mlflow_runs(client, options.pool)
    start = ["-m", "deployments.prefect_worker", "--pool", options.pool, "--name", name]
    os.execve(sys.executable, [sys.executable, *start, *passed_on], environment)  # noqa: S606  # no shell: the arguments are given here


if __name__ == "__main__":
    main(sys.argv[1:])
