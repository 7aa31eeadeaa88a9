"""The protocols of ranks, agents and launcher: lines of JSON, and exit statuses; uses only the standard library.

A rank sends its launcher, or the agent of its host, events on a pipe of their own. An agent and its launcher exchange
messages, objects whose `kind` is one of these:

| to the agent | fields | answer |
|---|---|---|
| prepare | spec, environment, names: of further variables, interface, address | cores, interface |
| mark | folder; and if given: make it; write, remove, see: names of files that test whether it is shared | missing |
| take_gpus | device, backend, num_ranks: of the host | are_taken |
| release_gpus | | |
| start | rank, environment | |
| signal | rank, number | |

| from the agent | fields |
|---|---|
| hello | versions; address: by which ssh reached the host, or None |
| answer | id: of the request; and the fields above, or error |
| activity | rank, value |
| output | rank, value: a line, an event, or null at the end of one of its two pipes for these |
| status | rank, value: exit status, as of subprocess |
| ending | reason: why the agent ends its ranks |

Both send `beat` every two seconds.
"""

import json
import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tasks.progress.activity import current
from tasks.system.signals import defer_signals

ACTIVITY = "activity"
"""Key of the event with the fields of a rank's `Activity`; every rank sends it, once per ACTIVITY_SECONDS."""

ACTIVITY_SECONDS = 0.5
"""Seconds between two activities of a rank."""

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_ENDED = 130
"""Exit status after a signal, as a shell reports SIGINT."""

BEAT_SECONDS = 2.0
"""Seconds between two beats of each end."""

SILENT_SECONDS = 30
"""Seconds without a message, of the other end's beats, after which the connection counts as lost.

A cut network closes no connection: without this limit, ranks on the other side of the cut would run for hours."""

CHUNK = 1 << 16

STRAY = "stray"
"""Kind of any other line, such as a greeting that a shell prints at login."""

Message = dict[str, Any]


class Reporter:
    """Sender of events, whose thread sends the activity of the main thread every half second.

    A thread, so that the last activity of a rank that hangs is known. The launcher tells it from progress by the
    activity's number of changes.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over the file descriptor of the pipe."""
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)
        # An activity that does not fit into the pipe is skipped: a stopped launcher must not stop its ranks.
        os.set_blocking(descriptor, False)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start sending the activity."""
        threading.Thread(target=self._send_activities, name="activity", daemon=True).start()

    def send(self, event: dict[str, Any]) -> None:
        """Send an event, and wait until it is in the pipe; a launcher that has ended gets none."""
        line = _line(event)
        # Deferred: a signal between two writes would leave half of a line.
        with defer_signals(), self._lock, suppress(BrokenPipeError):
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:
                    writable = select.poll()
                    writable.register(self._descriptor, select.POLLOUT)
                    writable.poll()

    def _send_activities(self) -> None:
        while True:
            # A line is shorter than PIPE_BUF: it is written as a whole or not at all.
            with self._lock, suppress(BlockingIOError, BrokenPipeError):
                os.write(self._descriptor, _line({ACTIVITY: current()}))
            threading.Event().wait(ACTIVITY_SECONDS)


def _line(event: dict[str, Any]) -> bytes:
    return f"{json.dumps(event)}\n".encode()


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
        line = _line({"kind": kind, **fields})
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
