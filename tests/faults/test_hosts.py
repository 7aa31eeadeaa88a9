"""Training on several hosts whose launcher or agents are killed, and whose network is cut."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.errors import HostLost
from tasks.storage import Storage
from tests.builders.killed_training import start_launcher
from tests.builders.ssh_hosts import SshHosts, find_sshd, start_hosts
from tests.fakes.ranks_on_hosts import STEPS, fake_spec, launch_and, processes_of, rank_processes, wait_until

pytestmark = [
    pytest.mark.skipif(find_sshd() is None or shutil.which("ssh") is None, reason="needs sshd (openssh-server)"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    """Return two running hosts."""
    with start_hosts(tmp_path / "ssh", ["one", "two"]) as running:
        yield running


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_ranks_on_hosts_end_with_launcher_and_agent(
    hosts: SshHosts, storage: Storage, tmp_path: Path, victim: str
) -> None:
    """SIGKILL of the launcher or of one agent leaves neither ranks nor agents nor sessions."""
    spec = fake_spec(hosts, storage, STEPS.format(home=storage.home))
    with start_launcher(spec, tmp_path / "spec.json") as launcher:
        ranks = rank_processes(storage)
        if victim == "launcher":
            launcher.kill()
        else:
            parent = ranks[2].parent()
            assert parent is not None
            parent.kill()
        _, errors = launcher.communicate(timeout=120)
    _gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert alive == []
    wait_until(lambda: processes_of(hosts) == [])
    assert victim == "launcher" or "host 'two' is lost with rank 2" in errors


def test_host_whose_connection_is_silent_is_lost_at_both_ends(hosts: SshHosts, storage: Storage) -> None:
    """As after a cut of the network, no end sees the connection closed: the agent ends its ranks, the launcher all."""
    ranks: list[psutil.Process] = []

    def cut() -> None:
        ranks.extend(rank_processes(storage))
        for child in psutil.Process().children():
            if child.name() == "ssh" and "two" in child.cmdline():
                child.suspend()

    with pytest.raises(HostLost, match=r"^host 'two' is lost with rank 2 \(nothing was heard of it for 30 s\)"):
        launch_and(fake_spec(hosts, storage, STEPS.format(home=storage.home)), cut)
    assert len(ranks) == 3
    _gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    wait_until(lambda: processes_of(hosts) == [])
