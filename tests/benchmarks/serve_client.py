"""Clients of serve.py: `serve_client.py HOST:PORT CLIENTS SECONDS FOLDER`; prints status counts and times as JSON.

Each client is a connection that sends the bytes of a file of FOLDER, waits for the whole answer, and sends the next.
One process has all of them, with as little work per request as Python allows: it shares the cores with the server.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

WARM_UP = 2.0
"""Seconds at the beginning that do not count."""


class Client(asyncio.Protocol):
    """A connection."""

    def __init__(self, requests: Iterator[bytes], times: list[tuple[float, float]], statuses: "Counter[str]") -> None:
        self._requests, self._times, self._statuses = requests, times, statuses
        self._buffer = bytearray()
        self._sent = 0.0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Note an answer that is whole, and send the next request."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(self._buffer) < end + 4 + length:
            return
        now = time.perf_counter()
        self._statuses[head[9:12].decode()] += 1
        if head[9:12] == b"200":
            self._times.append((now, now - self._sent))
        del self._buffer[: end + 4 + length]
        if b"connection: close" in head:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, _error: Exception | None) -> None:
        """Note the end of the connection."""
        if not self.closed.done():
            self.closed.set_result(None)


async def ask(address: str, num_clients: int, seconds: float, requests: Sequence[bytes]) -> dict[str, object]:
    """Return statuses, answers per second and percentiles of their times (ms) after the warm-up."""
    host, _, port = address.partition(":")
    times: list[tuple[float, float]] = []
    statuses: Counter[str] = Counter()
    loop, endless = asyncio.get_running_loop(), cycle(requests)

    async def keep() -> None:
        while True:  # A server may close a connection with its answer.
            _transport, client = await loop.create_connection(lambda: Client(endless, times, statuses), host, int(port))
            await client.closed

    began = time.perf_counter()
    clients = [asyncio.ensure_future(keep()) for _number in range(num_clients)]
    done, _pending = await asyncio.wait(clients, timeout=seconds + WARM_UP)
    for client in done:
        client.result()  # It ends with an error alone.
    ended = time.perf_counter()
    for client in clients:
        client.cancel()
    counted = sorted(took for at, took in times if began + WARM_UP <= at <= ended)
    part = counted or [float("nan")]
    return {
        "statuses": dict(statuses),
        "rate": len(counted) / (ended - began - WARM_UP),
        "p50": 1000 * part[len(part) // 2],
        "p99": 1000 * part[min(len(part) - 1, int(0.99 * len(part)))],
    }


if __name__ == "__main__":
    files = [file.read_bytes() for file in sorted(Path(sys.argv[4]).iterdir())]
    print(json.dumps(asyncio.run(ask(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), files))))
