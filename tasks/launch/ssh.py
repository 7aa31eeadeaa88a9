"""Agents on other machines, each started by an ssh process of its own whose input stays open."""

import logging
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tasks.collectives.key_value_store import StoreAddress
from tasks.config.distributed import DistributedConfig, parse_hosts
from tasks.errors import HostLost, WrongInput
from tasks.launch.code_version import code_folder
from tasks.launch.protocol import SILENT_SECONDS, Channel
from tasks.launch.rank_process import RankOutput
from tasks.launch.remote import Agent
from tasks.text.markup import printable
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

CONNECT_SECONDS = 90.0
"""Time limit from the start of ssh to the greeting of the agent: ssh tries two addresses twice, 20 s each."""

CLOSE_SECONDS = 10.0
"""Time limit for the end of all agents and their ssh, after which ssh is killed; the agents end by themselves."""

SSH_FAILED = 255
"""Exit status of ssh if the connection failed; others are those of the command."""

OPTIONS = (
    *("-T", "-a", "-x"),  # no terminal, no forwarded keys, no windows
    *("-o", "BatchMode=yes"),  # a question for a password would wait forever
    # Two attempts: after a cut of a network, the kernel may still refuse the first one ("No route to host").
    *("-o", "ConnectTimeout=20", "-o", "ConnectionAttempts=2"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    # Forwardings of the user's configuration may fail. LogLevel INFO prints the port of that to the launcher.
    *("-o", "ExitOnForwardFailure=no", "-o", "ControlPath=none", "-o", "LogLevel=INFO"),
)

FORWARDED = re.compile(r"Allocated port (\d+) for remote forward to")
"""The line of ssh with the port of the host that leads to the launcher's store."""

FORWARD_SECONDS = 10.0
"""Time limit for that line after the greeting of the agent; ssh asks for the port before it starts the agent."""

SETTING = "distributed.hosts"
"""The setting of most errors of a host that is not reached."""

LAST_LINES = 20
"""Lines of ssh's errors that are kept."""

REASONS = (
    ("Could not resolve hostname", "its name is unknown", "correct distributed.hosts, or ssh's configuration"),
    (
        "Permission denied",
        "it accepts none of the keys",
        "put a public key of this user into ~/.ssh/authorized_keys there, or name the key in ssh's configuration",
    ),
    ("Host key verification failed", "its own key is unknown here or has changed", "connect once by hand to check it"),
    ("Too many authentication failures", "too many keys were offered", "name one in ssh's configuration"),
    ("Bad configuration option", "ssh's configuration is not valid", "correct it"),
    ("Can't open user config file", "distributed.ssh_config cannot be read", "correct its path"),
    (
        "No module named",
        "its Python does not find this package",
        "install it there, or correct distributed.host_folder and host_python",
    ),
)
"""Texts in the errors of ssh and of the agent, what they mean for a user, and the way out."""


class SshProcess:
    """An ssh process with an agent at its other end."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self._host = host
        self._errors: deque[str] = deque(maxlen=LAST_LINES)
        self._port: queue.Queue[int] = queue.Queue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its own session, so that Ctrl-C on the terminal reaches the ranks only through this process.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.channel = Channel(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._reader = threading.Thread(target=self._read_errors, name=f"ssh-{host}", daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for line in errors:
                text = printable(line.decode(errors="replace").rstrip())
                if found := FORWARDED.search(text):
                    self._port.put(int(found[1]))
                    self._errors.clear()  # What a host shows before its login.
                    continue
                self._errors.append(text)
                logger.debug("host '%s': %s", self._host, text)

    def forwarded_port(self) -> int:
        """Return the port of the host's loopback interface that leads to the launcher's store.

        Raises:
            WrongInput: The host forwards no port.
        """
        try:
            return self._port.get(timeout=FORWARD_SECONDS)
        except queue.Empty:
            raise WrongInput(
                f"distributed.hosts has '{self._host}', whose sshd forwards no port to this machine",
                setting=SETTING,
                way_out="set AllowTcpForwarding to yes or remote there",
            ) from None

    def reason(self) -> str:
        """Return the reason why the connection ended, after it has: the last error of ssh or of the agent."""
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return f"nothing was heard of it for {SILENT_SECONDS} s"
        self._reader.join(timeout=1.0)
        if lines := [line for line in self._errors if line]:
            return lines[-1]
        return "ssh was disconnected" if status == SSH_FAILED else f"ssh ended with status {status}"

    def refusal(self, python: str) -> WrongInput | HostLost | None:
        """Return the error for a connection that ended before the agent's greeting; None if ssh still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        if self._process.returncode is None:
            return None
        reason = self.reason()
        text = " ".join(self._errors)
        for part, meaning, way_out in REASONS:
            if part in text:
                sentence = f"distributed.hosts has '{self._host}', and {meaning}: {way_out} ({reason})"
                return WrongInput.complete(sentence, setting=SETTING, way_out=way_out)
        if self._process.returncode in {126, 127}:
            return WrongInput(
                f"distributed.hosts has '{self._host}', which cannot run '{python}' ({reason})",
                setting="distributed.host_python",
                way_out="install Python there, or give its path as distributed.host_python",
            )
        if self._process.returncode == SSH_FAILED:
            return HostLost(
                f"host '{self._host}' is not reached ({reason})", self._host, way_out="start it, or leave it out"
            )
        return HostLost(
            f"the agent on host '{self._host}' ended at once ({reason})", self._host, way_out="correct that there"
        )

    def end(self, *, kill: bool = False) -> None:
        """End the agent by the end of its input, and ssh with it, without a wait.

        Args:
            kill: Whether to kill ssh at once: it reads nothing.
        """
        assert self._process.stdin is not None
        if kill:
            self._process.kill()
        with suppress(OSError):
            self._process.stdin.close()

    def join(self, seconds: float) -> None:
        """Wait until ssh has ended, after `end`; kill it if it does not end in time."""
        try:
            self._process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # A proxy that ssh started has inherited this pipe, and lives until its own connection ends.
        self._reader.join(timeout=1.0)

    def close(self) -> None:
        """Close the pipe from ssh that nothing reads any more; its other one is closed once all have closed theirs."""
        assert self._process.stdout is not None
        self._process.stdout.close()


def _as_lost(refusal: WrongInput | HostLost, host: str) -> HostLost:
    """Return a refusal as the loss of a host that had ranks before, and may come back."""
    lost = HostLost.complete(refusal, setting=refusal.setting, way_out=refusal.way_out)
    lost.host = host
    return lost


def ssh_command(host: str, settings: DistributedConfig, port: int) -> list[str]:
    """Return the command that starts the agent of a host; no setting or secret of the training run is on it.

    Args:
        host: Name of the host.
        settings: Its interpreter and folder.
        port: Port of this machine that its ranks reach: that of the store.
    """
    agent = [
        *("exec", "env", f"PYTHONPATH={settings.host_folder or code_folder()}"),
        # -P: a folder `tasks` in the home there is not this package.
        *(settings.host_python or sys.executable, "-P", "-m", "tasks.launch.host_agent"),
    ]
    chosen = ("-F", settings.ssh_config) if settings.ssh_config else ()
    forwarded = f"127.0.0.1:0:127.0.0.1:{port}"  # a free port there
    return ["ssh", *chosen, *OPTIONS, "-R", forwarded, "--", host, shlex.join(agent)]


@contextmanager
def ssh_agents(spec: TrainingSpec, store: StoreAddress, output: RankOutput) -> Iterator[list[Agent]]:
    """Start an agent on each host that is not lost, all at once, and yield them; end them with the block.

    Args:
        spec: The training run.
        store: The launcher's store.
        output: Gets the output, events and activities of the ranks.

    Raises:
        WrongInput: A host is unknown, refuses the key, forwards no port, or has no such interpreter.
        HostLost: A host is not reached; after a restart for any reason, since it was reached before.
    """
    settings = spec.distributed
    assert settings is not None, "a single process runs on this machine"
    started: list[tuple[SshProcess, Agent]] = []
    python = settings.host_python or sys.executable
    try:
        for host, slots in parse_hosts(settings.hosts, spec.lost_hosts):
            try:
                process = SshProcess(host, ssh_command(host, settings, store.port))
            except FileNotFoundError:
                raise WrongInput(
                    "distributed.launcher is 'hosts', and this machine has no ssh",
                    setting="distributed.launcher",
                    way_out="install openssh-client",
                ) from None
            started.append((process, Agent(host, slots, process.channel, output, process.reason)))
        deadline = time.monotonic() + CONNECT_SECONDS
        for process, agent in started:
            try:
                agent.wait_until_ready(max(1.0, deadline - time.monotonic()))
            except HostLost as error:
                refusal = process.refusal(python) or error
                raise (_as_lost(refusal, agent.host) if spec.restart else refusal) from None
            agent.store = store._replace(port=process.forwarded_port())
        yield [agent for _, agent in started]
    finally:
        for process, agent in started:
            process.end(kill=not agent.close())
        deadline = time.monotonic() + CLOSE_SECONDS
        for process, agent in started:
            process.join(deadline - time.monotonic())
            agent.join()
            process.close()
