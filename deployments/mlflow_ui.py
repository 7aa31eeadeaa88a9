"""MLflow's UI on the runs under a home: prepare the tracking database, and run MLflow's own command."""

import argparse
import sys
from collections.abc import Sequence

from mlflow.cli import cli

from deployments.stack_processes import HOST
from tasks.config import StorageConfig
from tasks.environment import lakevision_home
from tasks.storage import resolve_storage, tracking_file
from tasks.tracking import prepare_tracking


def main(arguments: Sequence[str]) -> None:
    """Serve the UI until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    port = parser.parse_args(arguments).port
    home = str(lakevision_home())
    # The home's own database, as the workers of its stack have it.
    storage = resolve_storage(StorageConfig(home=home, tracking=tracking_file(home)))
    prepare_tracking(storage)
    # In this process, which has imported MLflow already. One worker: several are ended by a health check of 5 s
    # while they import on a busy machine.
    cli(["ui", "--backend-store-uri", storage.tracking, "--host", HOST, "--port", str(port), "--workers", "1"])


if __name__ == "__main__":
    main(sys.argv[1:])
