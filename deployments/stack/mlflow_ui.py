"""MLflow's server and UI on a home's runs, behind the stack's login and without paths that run commands.

MLflow's server requires no login of its own. Any client that reaches it can run commands as its user: the Assistant
has a shell. It can also read and write any file of that user: an experiment's creator chooses its artifact location.
"""

import argparse
import base64
import hmac
import os
import re
import sys
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.stack.login import MLFLOW_LOGIN, OWN_STRING, auth_file, auth_string, own_auth_string
from deployments.stack.pages import MLFLOW_ADDITION, WithAddition
from tasks.config.storage import StorageConfig
from tasks.environment import MLFLOW_PORT, lakevision_home
from tasks.errors import WrongInput
from tasks.storage import Storage, resolve_storage
from tasks.system.listening import add_address, host_names, listening_socket, serve

NOT_SERVED = re.compile(
    r"/+(?:gateway|(?:ajax-)?api/+[\d.]+/+(?:jobs|mlflow/+(?:assistant|gateway|gateway-proxy|jobs|scorer/+invoke"
    r"|genai/+evaluate|issues/+invoke|prompt-optimization|webhooks|runs/+create-promptlab-run|demo)))(?:/|$)",
    re.IGNORECASE,
)
"""Paths that run commands (the Assistant), start jobs, or send requests to addresses of the caller's choice (gateway,
webhooks, prompts). Nothing of this project uses them."""

HEALTH = "/health"


class Guard:
    """ASGI middleware that rejects forbidden requests and passes on the others."""

    def __init__(self, app: ASGIApp, auth: str, hosts: Sequence[str], port: int) -> None:
        """Wrap an application.

        Args:
            app: The application.
            auth: The login, `user:password`.
            hosts: Host names of the server.
            port: Port in the origin of its pages, `http://HOST:PORT`.
        """
        self._app = app
        # Browsers always send a colon, also for a login without a password.
        self._basic = base64.b64encode((auth if ":" in auth else f"{auth}:").encode())
        self._token = auth.encode()
        self._hosts = frozenset(hosts)
        self._origins = frozenset(f"http://{host}:{port}" for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        if scope["type"] == "websocket":  # MLflow uses none.
            await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refuse(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refuse(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        # Before the login: a page that asks for it under a foreign host name would receive it (DNS rebinding).
        if re.sub(r":\d+$", "", headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("unknown host name", status_code=403)
        if NOT_SERVED.match(scope["path"]):
            return PlainTextResponse("not served here", status_code=404)
        # For every method: MLflow itself would let any page of this machine read the response.
        if (origin := headers.get("origin")) is not None and origin not in self._origins:
            return PlainTextResponse("requests from another origin are refused", status_code=403)
        if scope["path"] == HEALTH or self._is_logged_in(headers.get("authorization", "")):
            return None
        challenge = {"WWW-Authenticate": 'Basic realm="lakevision", charset="UTF-8"'}
        return PlainTextResponse("log in with the user and password of the stack", status_code=401, headers=challenge)

    def _is_logged_in(self, authorization: str) -> bool:
        """Return whether a header has the login, as browsers send it or as a token (MLFLOW_TRACKING_TOKEN)."""
        scheme, _, given = authorization.partition(" ")
        expected = {"basic": self._basic, "bearer": self._token}.get(scheme.lower())
        return expected is not None and hmac.compare_digest(given.strip().encode("latin-1"), expected)


def server_environment(storage: Storage, hosts: Sequence[str], port: int) -> dict[str, str]:
    """Return the variables that `mlflow server` sets for its worker process, since this process acts as one.

    Args:
        storage: Its tracking database is served; artifacts uploaded through the server are stored in its home.
        hosts: Host names of the server.
        port: Port of its pages.
    """
    return {
        "_MLFLOW_IN_JOB_EXECUTOR": "false",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"{storage.home}/mlartifacts",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_BOOT_ID": uuid.uuid4().hex,
        "_MLFLOW_SERVER_FILE_STORE": storage.tracking,
        "_MLFLOW_SERVER_REGISTRY_STORE": storage.tracking,
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # MLflow's own checks stay enabled behind those of the guard.
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{host},{host}:*" for host in hosts),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in hosts),
        "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
        # It would start eight processes for jobs on traces and prompts, which nothing here uses.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def served_storage(home: str) -> Storage:
    """Return the storage whose tracking database is served: that of $LAKEVISION_TRACKING_URI, or the home's.

    Raises:
        WrongInput: The runs are tracked by a server, which has its own UI.
    """
    storage = resolve_storage(StorageConfig(home=home))
    if storage.tracking.startswith("http"):
        raise WrongInput(
            f"LAKEVISION_TRACKING_URI is '{storage.tracking_shown}', a server with its own UI",
            way_out="open that UI, or unset the variable to see the runs of the home's own database",
        )
    return storage


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal is received, and return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    add_address(parser, MLFLOW_PORT)
    options = parser.parse_args(arguments)
    hosts = host_names(options)
    try:
        home = lakevision_home()
        # Before MLflow is imported and its database is created, which takes seconds.
        listening = listening_socket(options, "the MLflow UI")
        # Removed from the environment, so that child processes do not inherit it.
        login = os.environ.pop(MLFLOW_LOGIN, None)
        if login is None:
            login = auth_string(home)
            where = f"'{auth_file(home)}'" if own_auth_string() is None else f"${OWN_STRING}"
            print(f"the login is in {where}: user, colon, password", flush=True)
        storage = served_storage(str(home))
        # Before the import, at which MLflow reads these variables.
        os.environ.update(server_environment(storage, hosts, options.port))
        from mlflow.server.fastapi_app import app
        from mlflow.server.handlers import initialize_backend_stores

        from tasks.tracking.experiments import ExperimentDeleted
        from tasks.tracking.server import prepare_database, prepare_tracking

        prepare_database(storage)  # first: the file is readable by its owner only
        initialize_backend_stores(storage.tracking, storage.tracking, os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"])
        try:
            prepare_tracking(storage)
        except ExperimentDeleted as error:  # Its runs can be looked at all the same.
            print(f"mlflow_ui: {error}", flush=True)
    except WrongInput as error:  # also a moved home that cannot be written
        print(f"mlflow_ui: {error}", file=sys.stderr)
        return 2
    serve(Guard(WithAddition(app, MLFLOW_ADDITION), login, hosts, options.port), listening)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
