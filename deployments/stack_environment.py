"""The environment of a stack's processes: where they write, whom they ask, and the login of those that need it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from deployments.login import MLFLOW_LOGIN, OWN_STRING
from deployments.ports import HOST, LOCAL_NAMES
from tasks.storage import tracking_file


def stack_environment(home: Path, port: int, mlflow_port: int, auth: str) -> dict[str, str]:
    """Return the environment of a stack's processes, and of commands that talk to its server.

    Args:
        home: Folder under which they write.
        port: Port of the Prefect server.
        mlflow_port: Port of MLflow's UI.
        auth: The login, `user:password`.
    """
    url = f"http://{HOST}:{port}"
    binaries = str(Path(sys.executable).parent)
    return os.environ | {
        "LAKEVISION_HOME": str(home),
        # One database for all runs of the stack, whatever their `storage.home`: its MLflow UI shows this one.
        "LAKEVISION_TRACKING_URI": tracking_file(str(home)),
        "LAKEVISION_MLFLOW_UI": f"http://{HOST}:{mlflow_port}",
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_PROFILES_PATH": str(home / "prefect" / "profiles.toml"),
        "PREFECT_API_URL": f"{url}/api",
        # In the environment, which other users of the machine cannot read, and in no command line, which they can.
        "PREFECT_API_AUTH_STRING": auth,
        OWN_STRING: auth,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        # The UI's own origin, by both names that a browser on this machine may have for it.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in LOCAL_NAMES),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # A run starts within 2 s of its submission and not within 10: the server is on this machine.
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        # On disk like the slots they stand for: in memory, a killed server would never give them back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONUNBUFFERED": "1",
        **_past_proxies(os.environ),
    }


def mlflow_environment(environment: Mapping[str, str], auth: str) -> dict[str, str]:
    """Return the environment of MLflow's UI: the login to ask for, and none to Prefect, where it is code execution."""
    kept = {name: value for name, value in environment.items() if not _is_prefect_login(name)}
    return kept | {MLFLOW_LOGIN: auth}


def _is_prefect_login(name: str) -> bool:
    return name.startswith("PREFECT_") and name.endswith("AUTH_STRING")


def _past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep requests to this machine, and with them the login, from a proxy."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in LOCAL_NAMES if name not in names]
    # Clients read the one or the other.
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))
