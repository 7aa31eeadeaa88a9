"""The agent of a host, which starts its ranks: `python -m tasks.launch.host_agent`, messages on stdin and stdout.

ssh or a Spark task connects them to the launcher. The end of stdin ends the agent.

It imports no large package at first, so that it soon notices the end of its launcher. Then its ranks get SIGTERM and
soon SIGKILL. If it is killed itself, they exit by their own stdin (`start_rank`).
"""

import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.environment import rank_environment, ssh_address
from tasks.launch.code_version import code_versions
from tasks.launch.protocol import SILENT_SECONDS, Channel, Message
from tasks.launch.rank_process import Message as RankMessage
from tasks.launch.rank_process import RankOutput, RankProcess, start, terminate
from tasks.progress.activity import Activity
from tasks.system.signals import interrupt_on

GRACE_SECONDS = 5.0
"""Seconds that ranks have after SIGTERM once the launcher is gone."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end the agent."""

LAST_SECONDS = 1.0
"""Time limit for sending the reason of the end."""


class HostAgent:
    """The ranks of one host, and what they say."""

    def __init__(self, channel: Channel, folder: Path) -> None:
        """Start forwarding the output of ranks.

        Args:
            channel: Connection to the launcher.
            folder: Folder for the specification of the training run.
        """
        self._channel = channel
        self._spec_path = folder / "spec.json"
        self._environment: dict[str, str] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._messages: queue.Queue[RankMessage] = queue.Queue()
        self._requests: dict[str, Callable[[Message], dict[str, Any]]] = {
            "prepare": self._prepare,
            "mark": _mark,
            "take_gpus": self._take_gpus,
            "release_gpus": self._release_gpus,
        }
        self._gpus = ExitStack()
        self._locks: tuple[int, ...] = ()
        threading.Thread(target=self._forward_messages, name="messages", daemon=True).start()

    def handle(self, message: Message) -> None:
        """Handle a message of the launcher."""
        kind = message["kind"]
        if kind == "start":
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
        from tasks.system.cores import num_cores  # Here: it imports packages, which may take long from a cold disk.

        self._spec_path.write_text(message["spec"])
        paths = os.pathsep.join(path for path in sys.path if path)
        given = rank_environment(message["names"]) | message["environment"]
        self._environment = given | {"PYTHONPATH": paths}
        return {"cores": num_cores(), "interface": _choose_interface(message["interface"], message["address"])}

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
        def send_activity(rank: int, activity: Activity) -> None:
            self._channel.send("activity", rank=rank, value=activity)

        own = self._environment | environment
        rank = start(number, self._spec_path, own, RankOutput(self._messages, send_activity), self._locks)
        self._ranks[number] = rank

        def wait() -> None:
            self._channel.send("status", rank=number, value=rank.process.wait())

        threading.Thread(target=wait, name=f"rank-{number}-status", daemon=True).start()

    def _forward_messages(self) -> None:
        while True:
            rank, message = self._messages.get()
            self._channel.send("output", rank=rank.number, value=message)


def _choose_interface(wanted: str, address: str | None) -> str:
    """Return the name of the wanted interface, or of that with an address.

    Raises:
        ValueError: There is none.
    """
    import psutil

    names = [name for _, name in socket.if_nameindex()]
    if wanted:
        if wanted not in names:
            raise ValueError(f"its interfaces are {', '.join(names)}, not '{wanted}'")
        return wanted
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    if address is not None and ipaddress.ip_address(address).is_loopback:
        return "lo"  # Linux has all of 127.0.0.0/8 there, and shows the first address only.
    raise ValueError(f"none of its interfaces has the address {address}: name one in distributed.interface")


def _mark(message: Message) -> dict[str, Any]:
    """Write and remove files that test whether a folder is shared; return which of the given names are not there."""
    folder = Path(message["folder"])
    if message.get("make"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in message.get("write", ()):
        with (folder / name).open("x"):
            pass
    for name in message.get("remove", ()):
        (folder / name).unlink(missing_ok=True)
    # A listing, since a network file system may remember for a while that a name did not exist.
    found = set(os.listdir(folder))
    return {"missing": [name for name in message.get("see", ()) if name not in found]}


def own_channel() -> Channel:
    """Return the channel on stdin and stdout, which then have nothing to do with the output of this process."""
    read_from, write_to = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return Channel(read_from, write_to)


def run(channel: Channel, address: str | None) -> None:
    """Serve a launcher until the connection ends, then end the ranks.

    Args:
        channel: Connection to the launcher.
        address: Address by which ssh reached this host; None without ssh.
    """
    interrupt_on(*SIGNALS)
    with TemporaryDirectory(prefix="lakevision-agent-") as folder:
        agent = HostAgent(channel, Path(folder))
        reason = "its connection to the launcher ended"
        try:
            channel.send("hello", versions=code_versions(), address=address)
            channel.start_beats()
            for message in channel.receive():
                agent.handle(message)
            if channel.silent >= channel.max_silent:
                reason = f"its agent heard nothing of the launcher for {SILENT_SECONDS} s"
        except KeyboardInterrupt as interrupt:
            reason = f"its agent was ended by {interrupt}"
            raise
        except Exception as error:
            reason = f"its agent failed: {type(error).__name__}: {error}"
            raise
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            # Before the ranks end, and may report an end of their own: the launcher learns its cause.
            last = threading.Thread(target=channel.send, args=("ending",), kwargs={"reason": reason}, daemon=True)
            last.start()
            last.join(LAST_SECONDS)  # A launcher that was stopped reads nothing.
            agent.end_ranks()


if __name__ == "__main__":
    status = 0
    try:
        run(own_channel(), ssh_address())
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    # Not sys.exit: the last message may wait for a launcher that was stopped.
    sys.stderr.flush()
    os._exit(status)
