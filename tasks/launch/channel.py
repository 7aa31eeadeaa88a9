"""The connection of an agent and its launcher: lines of JSON on two descriptors; uses only the standard library."""

import json
import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 2.0
"""Seconds between two beats of each end."""

SILENT_SECONDS = 30
"""Seconds without a message, of the other end's beats, after which the connection counts as lost.

A cut network closes no connection: without this limit, ranks on the other side of the cut would run for hours."""

CHUNK = 1 << 16

STRAY = "stray"
"""Kind of any other line, such as a greeting that a shell prints at login."""

Message = dict[str, Any]


class Channel:
    """Sender and receiver of messages; the thread that receives also notices the end of the connection."""

    def __init__(self, read_from: int, write_to: int) -> None:
        """Take over two descriptors, which may be the same one, of a socket."""
        self._read_from = read_from
        self._write_to = write_to
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.silent = 0
        """Seconds since the last message was received."""
        self.max_silent = SILENT_SECONDS
        """Seconds of silence after which the connection counts as lost."""

    def start_beats(self) -> None:
        """Start a thread that shows the other end that this process lives."""

        def beat() -> None:
            while not self._closed.wait(BEAT_SECONDS):
                self.send("beat")

        threading.Thread(target=beat, name="beats", daemon=True).start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; the receiving thread notices that the connection is lost, not this call."""
        line = f"{json.dumps({'kind': kind, **fields})}\n".encode()
        with self._lock, suppress(OSError):
            while line and not self._closed.is_set():
                line = line[os.write(self._write_to, line) :]

    def receive(self) -> Iterator[Message]:
        """Yield the messages until the connection ends, or is silent for `max_silent` seconds."""
        poll = select.poll()
        poll.register(self._read_from, select.POLLIN)
        rest = b""
        while not self._closed.is_set() and self.silent < self.max_silent:
            # Counted, not measured: a process that was stopped itself has not listened meanwhile.
            if not poll.poll(1000):
                self.silent += 1
                continue
            self.silent = 0
            try:
                read = os.read(self._read_from, CHUNK)
            except OSError:
                return  # A connection that was reset has ended.
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from map(_parse, lines)

    def close(self) -> bool:
        """Send nothing more, and end `receive` within a second; return whether the descriptors are unused then.

        A message to a process that is stopped may be in the middle of a system call.
        """
        self._closed.set()
        is_unused = self._lock.acquire(timeout=1.0)
        if is_unused:
            self._lock.release()
        return is_unused


def _parse(line: bytes) -> Message:
    text = line.decode(errors="replace")
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    return message if isinstance(message, dict) and "kind" in message else {"kind": STRAY, "value": text}
