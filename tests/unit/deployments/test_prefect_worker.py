"""The worker that waits for its server."""

import anyio
import httpx
import pytest

from deployments.stack.prefect_worker import poll_through_outages


def test_worker_polls_on_where_prefect_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Each request of a long outage fails; the first one after it ends the test. Other errors end the worker."""
    requests = list[int]()

    async def look() -> None:
        requests.append(len(requests))
        if len(requests) < 30:
            raise httpx.ConnectError("refused")
        raise RuntimeError("another error")

    async def poll() -> None:
        await poll_through_outages(look, 0.001, jitter_range=0.3, backoff=4)

    with pytest.raises(RuntimeError, match="^another error$"):
        anyio.run(poll)
    assert len(requests) == 30
    assert capsys.readouterr().out.count("the worker waits for it, and its runs continue") == 2
