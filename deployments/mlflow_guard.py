"""The guard of MLflow's server: requires a login, checks host and origin, and blocks dangerous paths.

MLflow's server requires no login of its own. Any client that reaches it can run commands as its user: the Assistant
has a shell. It can also read and write any file of that user: an experiment's creator chooses its artifact location.
"""

import base64
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
