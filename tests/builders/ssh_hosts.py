"""Hosts of distributed training: sshds on this machine, with keys of their own and nothing in the user's folders."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tasks.system.listening import free_port

START_SECONDS = 60
"""Timeout of the start of an sshd, in seconds."""


def find_sshd() -> str | None:
    """Return the absolute path of sshd, by which it must be started; None where it is not installed."""
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


needs_sshd = pytest.mark.skipif(
    find_sshd() is None or shutil.which("ssh") is None, reason="needs sshd (openssh-server)"
)
"""Mark of tests that start hosts."""


@dataclass(frozen=True)
class SshHosts:
    """Running sshds.

    Attributes:
        folder: Folder with keys and configurations.
        config: Configuration file of ssh, with a `Host` for each.
        servers: The sshd of each host, by its name.
    """

    folder: Path
    config: Path
    servers: "dict[str, subprocess.Popen[bytes]]"

    def sessions(self, host: str) -> list[psutil.Process]:
        """Return the processes of sshd that serve the connections to a host; OpenSSH 10 has two for each."""
        found = []
        for process in self.processes(host):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if process.name().startswith("sshd"):
                    found.append(process)
        return found

    def processes(self, host: str) -> list[psutil.Process]:
        """Return all processes that ssh started on a host: agents and ranks."""
        return psutil.Process(self.servers[host].pid).children(recursive=True)


@contextmanager
def start_hosts(
    folder: Path,
    names: Sequence[str],
    hidden: Mapping[str, Path] | None = None,
    addresses: Mapping[str, str] | None = None,
    prefixes: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[SshHosts]:
    """Start an sshd per name, on an address and a port of its own; by default, of the loopback interface.

    The configuration also names `closed`, where nothing listens, and `refused`, the first host with another key.

    Args:
        folder: New folder for keys, configurations and logs.
        names: Names of the hosts.
        hidden: Folders that hosts have on a file system of their own; it needs the right to mount.
        addresses: Addresses of hosts that are not on the loopback interface.
        prefixes: Words before the commands of hosts, such as of a network namespace.
    """
    folder.mkdir(parents=True)
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "known_hosts").write_text(f"lakevision-test {(folder / 'host_key.pub').read_text()}")
    config = folder / "ssh_config"
    with ExitStack() as stack:
        places = {
            name: ((addresses or {}).get(name, f"127.0.0.{number}"), free_port())
            for number, name in enumerate(names, 2)
        }
        servers = {
            name: stack.enter_context(
                _sshd(folder, name, *place, (hidden or {}).get(name), (prefixes or {}).get(name, ()))
            )
            for name, place in places.items()
        }
        hosts = [_host(folder, name, *place, "user_key") for name, place in places.items()]
        first = places[names[0]]
        hosts += [_host(folder, "refused", *first, "other_key"), _host(folder, "closed", "127.0.0.1", 1, "user_key")]
        config.write_text("\n".join(hosts))
        yield SshHosts(folder, config, servers)


def _host(folder: Path, name: str, address: str, port: int, key: str) -> str:
    return (
        f"Host {name}\n HostName {address}\n Port {port}\n IdentityFile {folder}/{key}\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known_hosts\n HostKeyAlias lakevision-test\n StrictHostKeyChecking yes\n"
    )


@contextmanager
def _sshd(
    folder: Path, name: str, address: str, port: int, hidden: Path | None, prefix: Sequence[str]
) -> "Iterator[subprocess.Popen[bytes]]":
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd, as root, confines its unprivileged part
    config = folder / f"sshd_config-{name}"
    config.write_text(
        f"ListenAddress {address}:{port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin prohibit-password\n"
    )
    sshd = find_sshd()
    assert sshd is not None, "tests that need it are skipped without it"
    command = [*prefix, sshd, "-D", "-e", "-f", str(config)]
    if hidden is not None:
        command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(hidden), *command]
    with (folder / f"sshd-{name}.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        try:
            _wait_for(address, port)
            yield server
        finally:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()
            server.kill()
            server.wait()


def _wait_for(address: str, port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((address, port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
