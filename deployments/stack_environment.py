"""The environment variables of a stack's processes: folders, addresses of the servers, and logins."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from deployments.login import MLFLOW_LOGIN, OWN_STRING
from deployments.ports import HOST, LOCAL_NAMES
from tasks.storage import tracking_file


def stack_environment(home: Path, port: int, mlflow_port: int, auth: str) -> dict[str, str]:
    """Return the environment of a stack's processes, and of commands that connect to its server.

    Args:
        home: Home folder, below which the processes write.
        port: Port of the Prefect server.
        mlflow_port: Port of MLflow's UI.
        auth: The login, `user:password`.
    """
    url = f"http://{HOST}:{port}"
    binaries = str(Path(sys.executable).parent)
    return os.environ | {
        "LAKEVISION_HOME": str(home),
        # One tracking database for all runs of the stack, whatever their `storage.home`: its MLflow UI shows this one.
        "LAKEVISION_TRACKING_URI": tracking_file(str(home)),
        "LAKEVISION_MLFLOW_UI": f"http://{HOST}:{mlflow_port}",
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_PROFILES_PATH": str(home / "prefect" / "profiles.toml"),
        "PREFECT_API_URL": f"{url}/api",
        # In the environment, which other users of the machine cannot read, and not on a command line, which they can.
        "PREFECT_API_AUTH_STRING": auth,
        OWN_STRING: auth,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        # The UI's own origin, by both host names that a browser on this machine may use.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in LOCAL_NAMES),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # A run starts within 1 s of its submission, not within the default of 10 s: the server is local.
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        # The shortest interval, so that a run whose process is gone is found soon.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # On disk, like the concurrency slots: leases in memory die with a killed server, and their slots stay taken.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONUNBUFFERED": "1",
        **_no_proxy(os.environ),
    }


def mlflow_environment(environment: Mapping[str, str], auth: str) -> dict[str, str]:
    """Return the environment of MLflow's UI: with its own login, without Prefect's, which permits code execution."""
    kept = {name: value for name, value in environment.items() if not _is_prefect_login(name)}
    return kept | {MLFLOW_LOGIN: auth}


def _is_prefect_login(name: str) -> bool:
    return name.startswith("PREFECT_") and name.endswith("AUTH_STRING")


def _no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep requests to this machine, and the login in them, away from a proxy."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in LOCAL_NAMES if name not in names]
    # Some clients read the lower-case variable, some the upper-case one.
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))
