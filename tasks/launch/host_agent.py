"""The agent of a host, which starts its ranks: `python -m tasks.launch.host_agent`, messages on stdin and stdout.

With --connect, it reads an `Invitation` on stdin and connects to its launcher. The end of stdin ends the agent.

It imports only the standard library at first, so that from the beginning it notices the end of its launcher. Then its
ranks get SIGTERM and soon SIGKILL. If it is killed itself, they exit by their own stdin (`start_rank`).
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.environment import ssh_address
from tasks.launch.channel import SILENT_SECONDS, Channel, Message
from tasks.launch.code_version import code_versions
from tasks.launch.handshake import TIMEOUT_SECONDS, greet_launcher
from tasks.launch.rank_process import Message as RankMessage
from tasks.launch.rank_process import RankProcess, start, terminate
from tasks.launch.tunnel import KINDS, Tunnel
from tasks.progress.activity import Activity

GRACE_SECONDS = 5.0
"""Seconds that ranks have after SIGTERM once the launcher is gone."""

LAST_SECONDS = 1.0
"""Time limit for sending the reason of the end."""


class HostAgent:
    """The ranks of one host, and what they say."""

    def __init__(
        self, channel: Channel, folder: Path, address: str | None, environment: Mapping[str, str], cores: int
    ) -> None:
        """Start forwarding the output of ranks.

        Args:
            channel: Connection to the launcher.
            folder: Folder for the specification of the training run.
            address: Address by which the launcher reaches this host; None if that is unknown.
            environment: Further variables for the ranks.
            cores: Number of cores for the ranks; 0 for those of the host.
        """
        self._channel = channel
        self._address = address
        self._tunnel = Tunnel(channel)
        self._spec_path = folder / "spec.json"
        self._environment = dict(environment)
        self._cores = cores
        self._ranks: dict[int, RankProcess] = {}
        self._messages: queue.Queue[RankMessage] = queue.Queue()
        self._requests: dict[str, Callable[[Message], dict[str, Any]]] = {
            "prepare": self._prepare,
            "forward": lambda message: {"port": self._tunnel.listen(message["port"])},
            "write": _write,
            "see": _see,
            "remove": _remove,
            "take_gpus": self._take_gpus,
            "release_gpus": self._release_gpus,
        }
        self._gpus = ExitStack()
        self._locks: tuple[int, ...] = ()
        threading.Thread(target=self._forward_messages, name="messages", daemon=True).start()

    def handle(self, message: Message) -> None:
        """Handle a message of the launcher."""
        kind = message["kind"]
        if kind in KINDS:
            self._tunnel.handle(message)
        elif kind == "start":
            self._start(message["rank"], message["environment"])
        elif kind == "signal":
            rank = self._ranks[message["rank"]]
            if rank.process.poll() is None:
                rank.process.send_signal(signal.Signals(message["number"]))
        elif kind in self._requests:
            try:
                answer = self._requests[kind](message)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._channel.send("answer", id=message["id"], **answer)

    def end_ranks(self) -> None:
        """Terminate the ranks, and wait until they have ended."""
        terminate(list(self._ranks.values()), GRACE_SECONDS)

    def _prepare(self, message: Message) -> dict[str, Any]:
        # Here: these import packages, which may take long from a cold disk.
        from tasks.environment import rank_environment
        from tasks.launch.interface import choose_interface
        from tasks.system.cores import num_cores

        self._spec_path.write_text(message["spec"])
        paths = os.pathsep.join(path for path in sys.path if path)
        self._environment = rank_environment() | message["environment"] | self._environment | {"PYTHONPATH": paths}
        return {"cores": self._cores or num_cores(), "interface": choose_interface(message["interface"], self._address)}

    def _take_gpus(self, message: Message) -> dict[str, Any]:
        from tasks.launch.gpus import gpus_to_choose_from
        from tasks.system.slots import Gpus, try_to_take_gpus

        names = gpus_to_choose_from(message["device"], message["backend"], message["num_ranks"])
        own = try_to_take_gpus(names, message["num_ranks"], self._gpus) if names else Gpus()
        if own is not None:
            self._environment |= own.environment
            self._locks = own.locks
        return {"are_taken": own is not None}

    def _release_gpus(self, _message: Message) -> dict[str, Any]:
        self._gpus.close()
        self._locks = ()
        return {}

    def _start(self, number: int, environment: dict[str, str]) -> None:
        def heard(rank: int, activity: Activity) -> None:
            self._channel.send("activity", rank=rank, value=activity)

        rank = start(number, self._spec_path, self._environment | environment, self._messages, heard, self._locks)
        self._ranks[number] = rank

        def wait() -> None:
            self._channel.send("status", rank=number, value=rank.process.wait())

        threading.Thread(target=wait, name=f"rank-{number}-status", daemon=True).start()

    def _forward_messages(self) -> None:
        while True:
            rank, message = self._messages.get()
            if message is None:
                self._channel.send("closed", rank=rank.number)
            else:
                self._channel.send("event" if isinstance(message, dict) else "line", rank=rank.number, value=message)


def _write(message: Message) -> dict[str, Any]:
    if message["make"]:
        Path(message["folder"]).mkdir(parents=True, exist_ok=True)
    for name in message["names"]:
        with Path(message["folder"], name).open("x"):
            pass
    return {"error": None}


def _see(message: Message) -> dict[str, Any]:
    # A listing, since a network file system may remember for a while that a name did not exist.
    found = set(os.listdir(message["folder"]))
    return {"missing": [name for name in message["names"] if name not in found]}


def _remove(message: Message) -> dict[str, Any]:
    for name in message["names"]:
        Path(message["folder"], name).unlink(missing_ok=True)
    return {"error": None}


def own_channel() -> Channel:
    """Return the channel on stdin and stdout, which then have nothing to do with the output of this process."""
    read_from, write_to = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return Channel(read_from, write_to)


def connect(invitation: dict[str, Any]) -> socket.socket:
    """Return the connection to the launcher that has sent an `Invitation`; the end of stdin ends this process."""
    connection = socket.create_connection((invitation["host"], invitation["port"]), timeout=TIMEOUT_SECONDS)
    greet_launcher(connection, invitation["secret"], invitation["number"])

    def watch() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
    return connection


def run(
    channel: Channel,
    address: str | None,
    host: str = "",
    machine: str = "",
    environment: Mapping[str, str] | None = None,
    cores: int = 0,
) -> None:
    """Serve a launcher until the connection ends, then end the ranks.

    Args:
        channel: As `HostAgent`; the same holds for the other arguments.
        address: See there.
        host: Name of the host, for a launcher that did not choose it.
        machine: Name of the machine, where that is another.
        environment: See there.
        cores: See there.
    """

    def end(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    with TemporaryDirectory(prefix="lakevision-agent-") as folder:
        agent = HostAgent(channel, Path(folder), address, environment or {}, cores)
        reason = f"its agent heard nothing of the launcher for {SILENT_SECONDS} s"
        try:
            channel.send("hello", versions=code_versions(), address=address, host=host, machine=machine)
            channel.start_beats()
            for message in channel.receive():
                agent.handle(message)
        except KeyboardInterrupt as interrupt:
            reason = f"its agent was ended by {interrupt}"
            raise
        except Exception as error:
            reason = f"its agent failed: {type(error).__name__}: {error}"
            raise
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            # Before the ranks end, and may report an end of their own: the launcher learns its cause.
            last = threading.Thread(target=channel.send, args=("ending",), kwargs={"reason": reason}, daemon=True)
            last.start()
            last.join(LAST_SECONDS)  # A launcher that was stopped reads nothing.
            agent.end_ranks()


def run_invited(invitation: dict[str, Any]) -> None:
    """Serve the launcher that has sent an `Invitation`."""
    with connect(invitation) as connection:
        channel = Channel(connection.fileno(), connection.fileno())
        environment, gpus, machine = dict(invitation["environment"]), invitation["gpus"], socket.gethostname()
        host = machine
        if gpus:
            # Tasks on one host see different GPUs: for their ranks, each is a host of its own.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            host = f"{host}-gpu-{'-'.join(gpus)}"
        run(channel, connection.getsockname()[0], host, machine, environment, invitation["cores"])


if __name__ == "__main__":
    status = 0
    try:
        if "--connect" in sys.argv:
            run_invited(json.loads(sys.stdin.buffer.readline()))
        else:
            run(own_channel(), ssh_address())
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    # Not sys.exit: threads of forwarded connections may wait in a system call.
    sys.stderr.flush()
    os._exit(status)
