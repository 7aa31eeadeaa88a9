"""Connections of the service's HTTP server: a connection that waits ends in time, and no other does."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from tasks.serve import guard
from tasks.serve.guard import Connection, Guard
from tasks.system.listening import HOST

WAIT = 60.0
"""Longest wait for what takes a second on an idle machine."""

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[bytes], Awaitable[Client]]


async def answer_after_the_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request once its body has come."""
    while (await receive()).get("more_body"):
        pass
    await PlainTextResponse("served")(scope, receive, send)


def run(talk: Callable[[Connect], Awaitable[None]]) -> None:
    """Run clients beside a server with a guard that asks for the key `key`."""

    async def serve() -> None:
        with socket.create_server((HOST, 0)) as listening:
            port = int(listening.getsockname()[1])

            async def connect(begin: bytes) -> Client:
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(begin)
                return reader, writer

            app = Guard(answer_after_the_body, {HOST}, "key", 1000, lambda *_request: None)
            server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="warning"))
            serving = asyncio.create_task(server.serve([listening]))
            await talk(connect)
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(serve(), 2 * WAIT))


def head(*lines: str) -> bytes:
    """Return the head of a request, with the name of the host."""
    return "\r\n".join(("POST /predict HTTP/1.1", f"Host: {HOST}", *lines, "", "")).encode()


WITH_KEY = "Authorization: Bearer key"


@pytest.mark.parametrize(
    ("begin", "then"),
    [
        (b"", b""),
        (b"POST /predict HT", b""),
        (head("Content-Length: 9"), b"a few"),
        (head("Content-Length: 9"), b"the whole"),
        (head(WITH_KEY, "Content-Length: 9"), b"the whole"),
    ],
    ids=["silent", "half a head", "refused, with a part", "refused, with all", "served, and silent then"],
)
def test_a_connection_that_waits_ends_in_time(begin: bytes, then: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client has sent; an answer comes before."""
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.5)

    async def talk(connect: Connect) -> None:
        reader, writer = await connect(begin)
        if then:
            await asyncio.sleep(0.1)
            writer.write(then)
        content = await asyncio.wait_for(reader.read(), WAIT)  # to its end
        assert content.split(b" ")[1:2] == ([b"200" if WITH_KEY.encode() in begin else b"401"] if then else [])
        writer.close()

    run(talk)


def test_a_client_that_sends_requests_in_time_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a body takes longer than a head may, and where two requests are sent at once."""
    monkeypatch.setattr(guard, "HEAD_SECONDS", 1.0)
    request = head(WITH_KEY, "Content-Length: 2")

    async def talk(connect: Connect) -> None:
        reader, writer = await connect(request + b"a")
        await asyncio.sleep(1.5)
        writer.write(b"b" + 2 * (request + b"ab"))
        for _answer in range(3):
            found = await asyncio.wait_for(reader.readuntil(b"served"), WAIT)
            assert found.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.2)
        writer.write(head("Content-Length: 2") + b"ab" + request + b"ab")  # Refused, and its body is dropped.
        assert (await asyncio.wait_for(reader.readuntil(b"KEY'\"}"), WAIT)).startswith(b"HTTP/1.1 401")
        assert (await asyncio.wait_for(reader.readuntil(b"served"), WAIT)).startswith(b"HTTP/1.1 200")
        writer.close()

    run(talk)


def test_a_refused_client_that_asked_before_its_body_loses_the_connection() -> None:
    """It may leave the body out, and its next request would be taken for it."""

    async def talk(connect: Connect) -> None:
        reader, writer = await connect(head("Content-Length: 9", "Expect: 100-continue"))
        content = await asyncio.wait_for(reader.read(), WAIT)
        assert content.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in content
        writer.close()

    run(talk)
