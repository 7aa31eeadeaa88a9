"""Tests of the Prefect server's response while a database does not answer."""

import asyncio
import logging
import socket

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from deployments.stack.prefect_server import OutageResponse

REFUSED = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 5432)")


def request(path: str, error: Exception, *, has_handler: bool = True) -> httpx.Response:
    """Send a request to an app that fails with an error. Like Prefect's, it mounts an API that handles all errors."""

    async def fail(_request: Request) -> Response:
        raise error

    async def answer(_request: Request) -> Response:
        return PlainTextResponse("answered")

    async def break_off(_request: Request) -> Response:
        async def parts():
            yield "begun"
            raise error

        return StreamingResponse(parts())

    async def handled(_request: Request, _error: Exception) -> Response:
        return PlainTextResponse("handled", status_code=500)

    functions = {"/fail": fail, "/answer": answer, "/break-off": break_off}
    routes = [Route(path, function, methods=["POST"]) for path, function in functions.items()]
    api = Starlette(routes=routes, exception_handlers={Exception: handled} if has_handler else {})
    outage = Middleware(OutageResponse, is_retryable=lambda error: isinstance(error, ZeroDivisionError))
    app = Starlette(routes=[Mount("/api", api)], middleware=[outage])

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path)

    return asyncio.run(send())


@pytest.mark.parametrize(
    "error",
    [
        *(REFUSED, TimeoutError(), RedisConnectionError("no"), ZeroDivisionError()),
        *(socket.gaierror(-3, "no name server"), OSError(113, "no route"), OSError("Multiple exceptions: refused")),
    ],
)
@pytest.mark.parametrize("has_handler", [True, False])
def test_unanswered_connection_is_answered_with_503(error, has_handler, caplog) -> None:
    """Prefect's clients repeat a request that is answered with 503, and the reason is logged."""
    caplog.set_level(logging.WARNING)
    response = request("/api/fail", error, has_handler=has_handler)
    assert (response.status_code, response.json()) == (503, {"exception_message": "Service Unavailable"})
    assert f"POST /api/fail is answered with 503: {error!r}" in caplog.messages


def test_other_errors_and_answers_are_unchanged() -> None:
    """An error of the server itself is not worth a repetition."""
    assert request("/api/fail", ValueError("wrong")).text == "handled"
    assert request("/api/fail", ValueError("wrong"), has_handler=False).status_code == 500
    assert request("/api/answer", REFUSED).text == "answered"
    assert request("/api/nowhere", REFUSED).status_code == 404


def test_begun_response_is_not_followed_by_another() -> None:
    """The client notices that it is incomplete."""
    response = request("/api/break-off", REFUSED)
    assert (response.status_code, response.text) == (200, "begun")
