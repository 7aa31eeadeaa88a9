"""Additions to the head of pages: to pages that a browser asks for, and to nothing else."""

import asyncio
from typing import Any

import pytest

from deployments.stack.pages import WithAddition

PAGE = b"<html><head><title>t</title></head><body></body></html>"
HTML = (b"content-type", b"text/html; charset=utf-8")


def answered(*headers: tuple[bytes, bytes], accept: bytes = b"text/html,*/*", method: str = "GET") -> tuple[Any, bytes]:
    """Return the headers and the body of a page in two parts, which an application sends with these headers."""
    asked: list[Any] = []
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, _receive: Any, send: Any) -> None:
        asked.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"content-length", b"55")]})
        await send({"type": "http.response.body", "body": PAGE[:20], "more_body": True})
        await send({"type": "http.response.body", "body": PAGE[20:]})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        given = [(b"accept", accept), (b"accept-encoding", b"gzip"), (b"if-none-match", b"x")]
        scope = {"type": "http", "method": method, "headers": given}
        await WithAddition(application, b"ADDED")(scope, None, send)  # type: ignore[arg-type]  # nothing is received

    asyncio.run(run())
    body = b"".join(message["body"] for message in sent[1:])
    start = dict(sent[0]["headers"]) | {"asked": dict(asked[0]["headers"])}
    return start, body


def test_page_gets_the_addition_at_the_end_of_its_head() -> None:
    """Its length is right, and the browser keeps neither an older page nor one without the addition."""
    inline = (b"content-disposition", b"inline; filename=index.html")  # as MLflow's page has it
    start, body = answered(HTML, inline, (b"etag", b"x"), (b"last-modified", b"y"))

    assert body == PAGE.replace(b"</head>", b"ADDED</head>")
    assert start[b"content-length"] == str(len(body)).encode()
    assert not {b"etag", b"last-modified"} & start.keys()
    assert start["asked"] == {b"accept": b"text/html,*/*"}


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        ([(b"content-type", b"application/json")], {}),
        ([HTML, (b"content-disposition", b"attachment; filename=report.html")], {}),
        ([HTML], {"accept": b"*/*"}),
        ([HTML], {"method": "POST"}),
    ],
    ids=["data", "file of a run", "request of a script", "form"],
)
def test_other_answers_stay_as_they_are(headers: list[tuple[bytes, bytes]], options: dict[str, Any]) -> None:
    """A downloaded file is the same as when it was logged."""
    start, body = answered(*headers, **options)

    assert body == PAGE
    assert start[b"content-length"] == b"55"
