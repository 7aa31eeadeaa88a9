"""Connections of a host to ports of the launcher, carried by the messages of a channel; standard library only."""

import base64
import itertools
import socket
import threading
from contextlib import suppress

from tasks.launch.channel import Channel, Message

KINDS = ("open", "data", "close")
"""Kinds of the messages of a tunnel."""

CHUNK = 1 << 15


class Tunnel:
    """One end of all forwarded connections of a channel.

    The agent listens, the launcher connects to its own port. So hosts need no way to the launcher other than the one by
    which it reached them, and the rendezvous is as private as that connection.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._connections: dict[int, socket.socket] = {}
        self._ended: set[int] = set()
        """Connections of which one direction has ended."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._allowed: set[int] = set()

    def allow(self, port: int) -> None:
        """Let the other end connect to a port of this machine's loopback interface."""
        self._allowed.add(port)

    def listen(self, port: int) -> int:
        """Forward connections from a free port of this machine to a port of the other; return the free one."""
        server = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            while True:
                connection, _ = server.accept()
                number = next(self._numbers)
                self._connections[number] = connection
                self._channel.send("open", number=number, port=port)
                self._start_reading(number, connection)

        threading.Thread(target=accept, name="tunnel", daemon=True).start()
        return int(server.getsockname()[1])

    def handle(self, message: Message) -> None:
        """Handle a message of one of KINDS."""
        number: int = message["number"]
        if message["kind"] == "open":
            self._connect(number, message["port"])
            return
        connection = self._connections.get(number)
        if connection is None:
            return
        with suppress(OSError):  # The process at this end may have closed it meanwhile.
            if message["kind"] == "data":
                connection.sendall(base64.b64decode(message["value"]))
            else:
                connection.shutdown(socket.SHUT_WR)
        if message["kind"] == "close":
            self._end_direction(number)

    def close(self) -> None:
        """Close all connections, once the channel carries no messages any more."""
        for number, connection in list(self._connections.items()):
            with suppress(OSError):  # Closed meanwhile.
                connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads it
            self._end_direction(number)

    def _connect(self, number: int, port: int) -> None:
        if port in self._allowed:
            with suppress(OSError):
                connection = self._connections[number] = socket.create_connection(("127.0.0.1", port))
                self._start_reading(number, connection)
                return
        self._channel.send("close", number=number)  # The process that connected sees that it is closed.

    def _start_reading(self, number: int, connection: socket.socket) -> None:
        def read() -> None:
            with suppress(OSError):  # Reset by the process at this end.
                while data := connection.recv(CHUNK):
                    self._channel.send("data", number=number, value=base64.b64encode(data).decode())
            self._channel.send("close", number=number)
            self._end_direction(number)

        threading.Thread(target=read, name=f"tunnel-{number}", daemon=True).start()

    def _end_direction(self, number: int) -> None:
        with self._lock:
            if number not in self._ended:
                self._ended.add(number)
                return
            self._ended.remove(number)
        self._connections.pop(number).close()
