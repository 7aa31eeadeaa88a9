"""The rank's end of the pipe to its launcher: events and the rank's activity; uses only the standard library."""

import json
import os
import select
import threading
from contextlib import suppress
from typing import Any

from tasks.launch.protocol import ACTIVITY, BEAT_SECONDS
from tasks.progress.activity import current
from tasks.system.signals import defer_signals


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
            threading.Event().wait(BEAT_SECONDS)


def _line(event: dict[str, Any]) -> bytes:
    return f"{json.dumps(event)}\n".encode()
