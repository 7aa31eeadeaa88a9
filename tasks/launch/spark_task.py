"""The Spark task that runs an agent on an executor, and connects it to the launcher as ssh does on other hosts.

The two ends of the connection authenticate each other by a secret that does not travel on it.
"""

import hmac
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import NamedTuple

from pyspark import BarrierTaskContext

TIMEOUT_SECONDS = 30
"""Time limit of the authentication for each message of the other end."""

CLOSE_SECONDS = 5.0
"""Time limit for the last messages of an agent that has ended."""

MAX_GREETING = 4096
"""Maximum length of a task's greeting."""

CHUNK = 1 << 16

NONCE_BYTES, DIGEST_BYTES = 32, 32

TASK, LAUNCHER = b"task", b"launcher"
"""The ends of a connection, in their proofs."""


@dataclass(frozen=True)
class AgentConfig:
    """The settings of the agents.

    The secret and the environment are in no command line and on no connection other than Spark's own.
    """

    host: str
    """Address of the launcher."""
    port: int
    secret: bytes
    environment: dict[str, str]


class Greeting(NamedTuple):
    """The task of an agent, as the launcher learns it."""

    number: int
    host: str
    """Name of the host; tasks with GPUs on one machine have different ones."""
    machine: str
    address: str
    """Address from which the task reaches the launcher."""
    cores: int
    """Cores of the task, spark.task.cpus."""


def greet_launcher(connection: socket.socket, secret: bytes, greeting: Greeting) -> None:
    """Authenticate both ends, and send the greeting.

    Raises:
        AuthenticationError: The other end does not have the secret.
        OSError, EOFError: It does not answer in time, or the connection ended.
    """
    with _authenticated(connection, secret, TASK, LAUNCHER) as messages:
        messages.send_bytes(json.dumps(greeting).encode())


def accept_task(connection: socket.socket, secret: bytes) -> Greeting:
    """Authenticate both ends, and return the greeting.

    Raises:
        AuthenticationError: The other end does not have the secret.
        OSError, EOFError: It does not answer in time, or the connection ended.
    """
    with _authenticated(connection, secret, LAUNCHER, TASK) as messages:
        return Greeting(*json.loads(messages.recv_bytes(MAX_GREETING)))


@contextmanager
def _authenticated(connection: socket.socket, secret: bytes, own: bytes, other: bytes) -> Iterator[Connection]:
    """Prove to the other end that this one has the secret, and check its proof; each proof names the end that gives it.

    Yields the messages of the connection. Reads have a time limit until the end of the block.

    `multiprocessing` has its own challenges, with MD5, which Python lacks on machines in FIPS mode.
    """
    connection.settimeout(None)  # `Connection` reads a blocking descriptor.
    _limit_reads(connection, TIMEOUT_SECONDS)
    with Connection(os.dup(connection.fileno())) as messages:
        nonce = os.urandom(NONCE_BYTES)
        messages.send_bytes(nonce)
        messages.send_bytes(hmac.digest(secret, own + messages.recv_bytes(NONCE_BYTES), "sha256"))
        if not hmac.compare_digest(messages.recv_bytes(DIGEST_BYTES), hmac.digest(secret, other + nonce, "sha256")):
            raise AuthenticationError("the other end does not have the secret")
        yield messages
    _limit_reads(connection, 0)


def _limit_reads(connection: socket.socket, seconds: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def run_agent(config: AgentConfig, _rows: Iterable[object]) -> Iterator[int]:
    """Run an agent until it ends, and yield the number of the task.

    Raises:
        RuntimeError: It ended with an error, which is in the log of the executor.
    """
    context = BarrierTaskContext.get()
    assigned = context.resources().get("gpu")
    gpus = [] if assigned is None else list(assigned.addresses)
    machine = socket.gethostname()
    # Tasks on one host see different GPUs: for their ranks, each is a host of its own.
    host = f"{machine}-gpu-{'-'.join(gpus)}" if gpus else machine
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    # Spark's archives are left out: each import would search their lists of files.
    folders = [path for path in sys.path if os.path.isdir(path)]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.launch.host_agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=os.environ | config.environment | visible | {"PYTHONPATH": os.pathsep.join(folders)},
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        to_agent, output = agent.stdin.fileno(), agent.stdout.fileno()
        if first := os.read(output, CHUNK):  # An agent that fails at its start does not reach the launcher.
            with _launcher_of(config, context.partitionId()) as connection:
                place = host, machine, connection.getsockname()[0], context.cpus()
                greet_launcher(connection, config.secret, Greeting(context.partitionId(), *place))
                connection.sendall(first)
                _relay(lambda: connection.recv(CHUNK), lambda data: _write(to_agent, data), agent.stdin.close)
                relay = _relay(
                    lambda: os.read(output, CHUNK), connection.sendall, lambda: connection.shutdown(socket.SHUT_RDWR)
                )
                agent.wait()
                relay.join(CLOSE_SECONDS)  # A launcher that was stopped reads nothing.
    if agent.returncode:
        raise RuntimeError(f"the agent of rank {context.partitionId()} ended with status {agent.returncode}")
    yield context.partitionId()


@contextmanager
def _launcher_of(config: AgentConfig, number: int) -> Iterator[socket.socket]:
    """Yield a connection to the launcher.

    Raises:
        RuntimeError: The launcher is not reached, or does not have the secret. Another start may help, as for an agent
            that ended.
    """
    try:
        with socket.create_connection((config.host, config.port), timeout=TIMEOUT_SECONDS) as connection:
            yield connection
    except (OSError, EOFError, AuthenticationError) as error:
        raise RuntimeError(f"the agent of rank {number} ended with status 1 ({error})") from error


def _relay(read: Callable[[], bytes], write: Callable[[bytes], None], end: Callable[[], None]) -> threading.Thread:
    """Start a thread that writes what it reads until the end of either side, and ends the other."""

    def relay() -> None:
        with suppress(OSError):
            while data := read():
                write(data)
        with suppress(OSError):
            end()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    return thread


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
