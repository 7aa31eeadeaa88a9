"""The launcher's end of the connection to a host's agent, and the ranks that it started."""

import itertools
import logging
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from tasks.errors import HostLost, WrongInput
from tasks.launch import rank_process
from tasks.launch.channel import BEAT_SECONDS, SILENT_SECONDS, STRAY, Channel, Message
from tasks.launch.rank_process import RankProcess
from tasks.launch.tunnel import KINDS, Tunnel
from tasks.progress.activity import Activity

logger = logging.getLogger("lakevision.ranks")

REQUEST_SECONDS = 300
"""Time limit of an agent's answer: it may import gigabytes from a cold disk, which holds Python's lock, so that it
sends no beats either."""

QUIET_SECONDS = 3 * BEAT_SECONDS
"""Silence after which a host may be lost."""

Heard = Callable[[int, Activity], None]


class RemoteProcess:
    """A process that an agent started; its methods are those of `subprocess.Popen`."""

    stdin = None

    def __init__(self, number: int, channel: Channel) -> None:
        self.returncode: int | None = None
        self._number = number
        self._channel = channel
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once the process has ended, or its host is lost."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"rank {self._number}", timeout or 0.0)
        assert self.returncode is not None, "a process that has ended has a status"
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.returncode is None:
            self._channel.send("signal", rank=self._number, number=int(sig))

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, status: int) -> None:
        """Note that the process has ended."""
        if self.returncode is None:
            self.returncode = status
            self._has_ended.set()


class Agent:
    """An agent, a `Place` on another host.

    Attributes:
        host: Name of the host; Spark's tasks with GPUs on one machine have different ones.
        machine: Name of its machine.
        slots: Maximum number of ranks.
        address: Address by which this machine reaches the host.
        cores: Number of its cores, once `prepare` has returned; the same holds for `interface`.
    """

    def __init__(
        self,
        host: str,
        slots: int,
        channel: Channel,
        messages: "queue.Queue[rank_process.Message]",
        heard: Heard,
        reason: Callable[[], str],
    ) -> None:
        """Start the thread that reads what the agent sends.

        Args:
            host: Name of the host.
            slots: Maximum number of ranks.
            channel: Connection to the agent.
            messages: Queue for the output and events of its ranks.
            heard: Called with the activities of its ranks.
            reason: Returns the reason why the connection ended, for a sentence; called once it has.
        """
        self.host, self.slots, self.address, self.machine = host, slots, "", ""
        self.cores, self.interface = 1, ""
        self.versions: dict[str, str] = {}
        self._channel = channel
        self._messages = messages
        self._heard = heard
        self._reason = reason
        self._tunnel = Tunnel(channel)
        self._ranks: dict[int, RankProcess] = {}
        self._num_closed: dict[int, int] = {}
        self._ids = itertools.count()
        self._answers: queue.Queue[Message | None] = queue.Queue()
        self._is_closing = False
        self.has_ended = False
        """Whether the connection has ended."""
        self._is_lost = False
        self._lock = threading.Lock()
        """Held to start a rank, and to note that the connection has ended: no rank is started after that."""
        channel.max_silent = REQUEST_SECONDS  # It may log in, and import, from a cold disk before it greets.
        channel.start_beats()  # At once: an agent may wait for its launcher to reach all others.
        self._thread = threading.Thread(target=self._read, name=f"agent-{host}", daemon=True)
        self._thread.start()

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the agent's greeting.

        Raises:
            HostLost: The connection ended, or the agent has not answered in time.
        """
        greeting = self._next_answer("hello", seconds)
        self._channel.max_silent = SILENT_SECONDS
        self.versions, self.address = greeting["versions"], greeting["address"] or ""
        self.host = greeting["host"] or self.host
        self.machine = greeting["machine"] or self.host

    @property
    def is_quiet(self) -> bool:
        """True if nothing was heard of the host for longer than its beats take."""
        return self._channel.silent > QUIET_SECONDS and not self.has_ended

    def prepare(self, spec: str, environment: dict[str, str], interface: str) -> None:
        """Send the settings that all ranks of the host share, and learn its cores and its network interface.

        Raises:
            WrongInput: The agent cannot use it.
        """
        answer = self.ask("prepare", spec=spec, environment=environment, interface=interface)
        self.cores, self.interface = answer["cores"], answer["interface"]

    def reach(self, port: int) -> int:
        """Return the port of the host's loopback interface that leads to a port of this machine's."""
        self._tunnel.allow(port)
        found: int = self.ask("forward", port=port)["port"]
        return found

    def start(self, number: int, environment: dict[str, str]) -> RankProcess:
        """Start a rank.

        Raises:
            HostLost: The connection ended.
        """
        with self._lock:
            if self.has_ended:
                raise HostLost(f"host '{self.host}' is lost ({self._reason()}): run again", self.host, [number])
            rank = self._ranks[number] = RankProcess(number, RemoteProcess(number, self._channel))
        self._channel.send("start", rank=number, environment=environment)
        return rank

    def ask(self, kind: str, **fields: Any) -> Message:
        """Return the answer of the agent to a request, as `ask_within` REQUEST_SECONDS."""
        return self.ask_within(REQUEST_SECONDS, kind, **fields)

    def ask_within(self, seconds: float, kind: str, **fields: Any) -> Message:
        """Return the answer of the agent to a request.

        Args:
            seconds: Time limit.
            kind: Name of the request.
            fields: Its arguments.

        Raises:
            HostLost: The connection ended, or the agent has not answered in time.
            WrongInput: The request failed there.
        """
        number = next(self._ids)
        self._channel.max_silent = REQUEST_SECONDS
        self._channel.send(kind, id=number, **fields)
        try:
            answer = self._next_answer(kind, seconds)
            while answer["id"] != number:  # The answer to a request that took too long.
                answer = self._next_answer(kind, seconds)
        finally:
            self._channel.max_silent = SILENT_SECONDS
        if answer.get("error"):
            raise WrongInput(f"host '{self.host}' cannot take part in training ({answer['error']}): correct that there")
        return answer

    def close(self) -> bool:
        """Send nothing more; return whether the channel's descriptors are unused, except for reading."""
        self._is_closing = True
        return self._channel.close()

    def join(self) -> None:
        """Wait until the thread that reads has ended, after `close`, and close forwarded connections."""
        self._thread.join()
        self._tunnel.close()

    def _next_answer(self, kind: str, seconds: float) -> Message:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise HostLost(
                f"host '{self.host}' has not answered '{kind}' within {seconds:.0f} s: check its load and its disks",
                self.host,
            ) from None
        if answer is None:
            self._answers.put(None)  # For the next request, which gets no answer either.
            raise HostLost(f"host '{self.host}' is lost ({self._reason()}): run again", self.host)
        return answer

    def _read(self) -> None:
        for message in self._channel.receive():
            self._handle(message)
        with self._lock:
            self.has_ended = True
        self._answers.put(None)
        running = self._running()
        self._mark_lost(self._reason)
        for rank in running:
            assert isinstance(rank.process, RemoteProcess), "an agent starts these"
            rank.process.end(-signal.SIGKILL)
        for number, rank in self._ranks.items():
            for _ in range(2 - self._num_closed.get(number, 0)):
                self._messages.put((rank, None))

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.process.poll() is None]

    def _mark_lost(self, reason: Callable[[], str]) -> None:
        """Give the running ranks the loss of their host as the cause of their end, unless it was asked for."""
        running = self._running()
        if not running or self._is_closing or self._is_lost:
            return
        self._is_lost = True
        numbers = sorted(rank.number for rank in running)
        named = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
        lost = HostLost(
            f"host '{self.host}' is lost with {named} ({reason()}); all ranks were ended: run again to resume from the "
            "last checkpoint",
            self.host,
            numbers,
        )
        for rank in running:
            rank.failure = lost

    def _handle(self, message: Message) -> None:
        kind, rank = message["kind"], self._ranks.get(message.get("rank", -1))
        if kind in KINDS:
            self._tunnel.handle(message)
        elif kind in {"hello", "answer"}:
            self._answers.put(message)
        elif kind == "ending":
            self._mark_lost(lambda: message["reason"])
        elif kind == STRAY:
            logger.info("host '%s': %s", self.host, message["value"])
        elif rank is None:
            return
        elif kind == "activity":
            self._heard(rank.number, Activity(*message["value"]))
        elif kind in {"line", "event"}:
            self._messages.put((rank, message["value"]))
        elif kind == "closed":
            self._num_closed[rank.number] = self._num_closed.get(rank.number, 0) + 1
            self._messages.put((rank, None))
        elif kind == "status":
            assert isinstance(rank.process, RemoteProcess), "an agent starts these"
            rank.process.end(message["value"])
