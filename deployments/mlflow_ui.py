"""MLflow's UI on the runs under a home: prepare the tracking database, and become MLflow's own command."""

import argparse
import os
import sys
from collections.abc import Sequence

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
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", storage.tracking]
    # One worker: several are ended by a health check of five seconds while they import on a busy machine.
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(command[0], command)  # noqa: S606  # no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
