"""The launcher's end of the connection to a host's agent, and the ranks that it started."""

import itertools
import logging
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.collectives.key_value_store import StoreAddress
from tasks.errors import HostLost, WrongInput
from tasks.launch.protocol import BEAT_SECONDS, SILENT_SECONDS, STRAY, Channel, Message
from tasks.launch.rank_process import RankOutput, RankProcess, RemoteProcess
from tasks.progress.activity import Activity

logger = logging.getLogger("lakevision.ranks")

REQUEST_SECONDS = 300
"""Time limit of an agent's answer: it may import gigabytes from a cold disk, which holds Python's lock, so that it
sends no beats either."""

QUIET_SECONDS = 3 * BEAT_SECONDS
"""Silence after which a host may be lost."""


class Agent:
    """An agent, a `Place` on another host.

    Attributes:
        host: Name of the host; Spark's tasks with GPUs on one machine have different ones.
        machine: Name of its machine.
        slots: Maximum number of ranks.
        address: Address by which this machine reaches the host.
        cores: Number of its cores, once `prepare` has returned; the same holds for `interface`.
        store: The launcher's store as the host reaches it.
    """

    def __init__(
        self,
        host: str,
        slots: int,
        channel: Channel,
        output: RankOutput,
        reason: Callable[[], str],
        machine: str = "",
        address: str = "",
        cores: int = 0,
    ) -> None:
        """Start the thread that reads what the agent sends.

        Args:
            host: Name of the host.
            slots: Maximum number of ranks.
            channel: Connection to the agent.
            output: Gets the output, events and activities of its ranks.
            reason: Returns the reason why the connection ended, for a sentence; called once it has.
            machine: Name of the machine, where that is another.
            address: Address by which this machine reaches the host; by default, the agent tells it.
            cores: Cores for the ranks; 0 for those of the host.
        """
        self.host, self.slots, self.machine, self.address = host, slots, machine or host, address
        self.cores, self.interface = cores, ""
        self.store: StoreAddress | None = None
        self.versions: dict[str, str] = {}
        self._channel = channel
        self._output = output
        self._reason = reason
        self._ranks: dict[int, RankProcess] = {}
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
        self.versions, self.address = greeting["versions"], self.address or greeting["address"] or ""

    @property
    def is_quiet(self) -> bool:
        """True if nothing was heard of the host for longer than its beats take."""
        return self._channel.silent > QUIET_SECONDS and not self.has_ended

    def prepare(self, spec: str, environment: Mapping[str, str], names: Sequence[str], interface: str) -> None:
        """Send the settings that all ranks of the host share, and learn its cores and its network interface.

        Args:
            spec: Specification of the training run, as JSON.
            environment: Environment of its ranks, besides what they have from the host.
            names: Names of further variables of the host for its ranks.
            interface: Network interface, `distributed.interface`.

        Raises:
            WrongInput: The agent cannot use it.
        """
        answer = self.ask(
            "prepare",
            spec=spec,
            environment=environment,
            names=names,
            interface=interface,
            address=self.address or None,
        )
        self.cores, self.interface = self.cores or answer["cores"], answer["interface"]

    def start(self, number: int, environment: dict[str, str]) -> RankProcess:
        """Start a rank.

        Raises:
            HostLost: The connection ended.
        """
        with self._lock:
            if self.has_ended:
                raise HostLost(
                    f"host '{self.host}' is lost ({self._reason()})", self.host, [number], way_out="run again"
                )
            rank = self._ranks[number] = RankProcess(number, RemoteProcess(number, self._channel))
        self._channel.send("start", rank=number, environment=environment)
        return rank

    def ask(self, kind: str, seconds: float = REQUEST_SECONDS, **fields: Any) -> Message:
        """Return the answer of the agent to a request.

        Args:
            kind: Name of the request.
            seconds: Time limit.
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
            raise WrongInput(
                f"host '{self.host}' cannot take part in training ({answer['error']})", way_out="correct that there"
            )
        return answer

    def close(self) -> bool:
        """Send nothing more; return whether the channel's descriptors are unused, except for reading."""
        self._is_closing = True
        return self._channel.close()

    def join(self) -> None:
        """Wait until the thread that reads has ended, after `close`."""
        self._thread.join()

    def _next_answer(self, kind: str, seconds: float) -> Message:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise HostLost(
                f"host '{self.host}' has not answered '{kind}' within {seconds:.0f} s",
                self.host,
                way_out="check its load and its disks",
            ) from None
        if answer is None:
            self._answers.put(None)  # For the next request, which gets no answer either.
            raise HostLost(f"host '{self.host}' is lost ({self._reason()})", self.host, way_out="run again")
        return answer

    def _read(self) -> None:
        for message in self._channel.receive():
            self._handle(message)
        with self._lock:
            self.has_ended = True
        self._answers.put(None)
        self._mark_lost(self._reason)
        for rank in self._ranks.values():
            assert isinstance(rank.process, RemoteProcess), "an agent starts these"
            rank.process.end(-signal.SIGKILL)
            for _ in range(rank.open_pipes):
                self._output.messages.put((rank, None))

    def _mark_lost(self, reason: Callable[[], str]) -> None:
        """Give the running ranks the loss of their host as the cause of their end, unless it was asked for."""
        running = [rank for rank in self._ranks.values() if rank.process.poll() is None]
        if not running or self._is_closing or self._is_lost:
            return
        self._is_lost = True
        numbers = sorted(rank.number for rank in running)
        named = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
        lost = HostLost(
            f"host '{self.host}' is lost with {named} ({reason()}); all ranks were ended",
            self.host,
            numbers,
            way_out="run again to resume from the last checkpoint",
        )
        for rank in running:
            # Its own report is the cause: wrong input is not retried on the hosts that are left.
            rank.failure = rank.failure or lost

    def _handle(self, message: Message) -> None:
        kind, rank = message["kind"], self._ranks.get(message.get("rank", -1))
        if kind in {"hello", "answer"}:
            self._answers.put(message)
        elif kind == "ending":
            self._mark_lost(lambda: message["reason"])
        elif kind == STRAY:
            logger.info("host '%s': %s", self.host, message["value"])
        elif rank is None:
            return
        elif kind == "activity":
            self._output.on_activity(rank.number, Activity(*message["value"]))
        elif kind == "output":
            self._output.messages.put((rank, message["value"]))
        elif kind == "status":
            assert isinstance(rank.process, RemoteProcess), "an agent starts these"
            rank.process.end(message["value"])
