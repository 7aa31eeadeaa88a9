"""A network namespace in place of another machine, joined to this one by a cable that a test cuts; it needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders.ssh_hosts import SshHosts, start_hosts


@dataclass(frozen=True)
class OtherMachine:
    """A network namespace.

    Attributes:
        namespace: Its name, which is also that of its end of the cable.
        address: Its address.
        address_here: Address of this machine at the other end of the cable.
    """

    namespace: str
    address: str
    address_here: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that runs there."""
        return "ip", "netns", "exec", self.namespace

    def cut(self) -> None:
        """Cut the cable: no end sees a connection closed."""
        _ip("-n", self.namespace, "link", "set", self.namespace, "down")

    def join(self) -> None:
        """Join the cable again."""
        _ip("-n", self.namespace, "link", "set", self.namespace, "up")

    def is_sought(self) -> bool:
        """Return whether the kernel here asks the network for this machine, and has neither found it nor given up."""
        return "INCOMPLETE" in _ip("neighbour", "show", "to", self.address)


@contextmanager
def other_machine() -> Iterator[OtherMachine]:
    """Create a network namespace and a cable to it, or skip the test where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian: iproute2), for a network that can be cut")
    name, here = f"lv{os.getpid()}", f"lh{os.getpid()}"
    # Of the addresses that are reserved for tests of network devices (RFC 2544).
    network = f"198.18.{os.getpid() % 256}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if added.returncode:
        pytest.skip(f"needs root and network namespaces, for a network that can be cut: {added.stderr.strip()}")
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", name, "netns", name)
        _ip("addr", "add", f"{network}.1/24", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "addr", "add", f"{network}.2/24", "dev", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", name, "up")
        yield OtherMachine(name, f"{network}.2", f"{network}.1")
    finally:
        _ip("netns", "del", name)  # both ends of the cable with it


@contextmanager
def hosts_apart(folder: Path) -> Iterator[tuple[OtherMachine, SshHosts]]:
    """Start the host `one` on this machine and `two` on another one, or skip the test as `other_machine`."""
    with (
        other_machine() as machine,
        start_hosts(
            folder,
            ["one", "two"],
            addresses={"one": machine.address_here, "two": machine.address},
            prefixes={"two": machine.prefix},
        ) as hosts,
    ):
        yield machine, hosts


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], stdout=subprocess.PIPE, text=True, check=True).stdout
