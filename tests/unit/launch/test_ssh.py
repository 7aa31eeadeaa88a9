"""The ssh process of an agent, with a shell in its place."""

import time

import psutil
import pytest

from tasks.errors import WrongInput
from tasks.launch import ssh
from tasks.launch.ssh import SshProcess


def test_process_that_ssh_has_started_does_not_delay_the_end() -> None:
    """A proxy outlives ssh for as long as its own connection, and keeps the pipe of the errors open."""
    process = SshProcess("two", ["sh", "-c", "sleep 600 & echo begun >&2; cat"])
    parent = psutil.Process(process._process.pid)
    deadline = time.monotonic() + 10
    while not (proxies := [child for child in parent.children() if child.name() == "sleep"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        process.end()
        began = time.monotonic()
        process.join(5)
        process.close()
        assert time.monotonic() - began < 5
        assert process.reason() == "begun"
    finally:
        for proxy in proxies:
            proxy.kill()


def test_pipes_are_closed_at_the_end() -> None:
    """No descriptor is left for each start of the ranks."""
    process = SshProcess("two", ["cat"])
    process.end()
    process.join(5)
    process.close()
    assert process._process.returncode == 0
    assert process._process.stdout is not None
    assert process._process.stderr is not None
    assert process._process.stdout.closed
    assert process._process.stderr.closed


def test_port_of_the_store_is_read_from_ssh() -> None:
    """The lines before it, such as a banner, do not explain a later end."""
    line = "Allocated port 4242 for remote forward to 127.0.0.1:4711"
    process = SshProcess("two", ["sh", "-c", f"echo Welcome >&2; echo {line} >&2; cat"])
    assert process.forwarded_port() == 4242
    process.end()
    process.join(5)
    process.close()
    assert process.reason() == "ssh ended with status 0"


def test_host_that_forwards_no_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sshd may forbid it."""
    monkeypatch.setattr(ssh, "FORWARD_SECONDS", 0.2)
    process = SshProcess("two", ["sh", "-c", "echo Warning: remote port forwarding failed for listen port 0 >&2; cat"])
    with pytest.raises(WrongInput, match="'two', whose sshd forwards no port") as refused:
        process.forwarded_port()
    assert refused.value.setting == "distributed.hosts"
    process.end()
    process.join(5)
    process.close()
