"""Training on several hosts whose launcher or agents are killed, and whose network is cut."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.errors import HostLost, TimeLimitExceeded
from tasks.launch.launcher import launch_ranks
from tasks.storage import Storage, resolve_storage
from tasks.train.checkpoint_files import newest_position
from tasks.train.spec import TrainingSpec
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_training import TRAIN, logged_epochs, rank_of, runs_beside, start_launcher
from tests.builders.leftovers import Leftovers
from tests.builders.networks import OtherMachine, hosts_apart
from tests.builders.processes import rank_processes as ranks_of
from tests.builders.rank_cases import BACKENDS
from tests.builders.ssh_hosts import SshHosts, needs_sshd, start_hosts
from tests.builders.training_runs import ROUNDED, weights
from tests.fakes.ranks_on_hosts import (
    STEPS,
    fake_spec,
    launch_and,
    processes_of,
    programs_of,
    rank_processes,
    settings,
    wait_until,
)
from tests.faults.conftest import at_most

NUM_CUTS = at_most(10)
"""Rounds for each backend: one takes more than a minute, for most of which both ends wait for each other."""

NUM_KILLS = at_most(3)
"""Rounds for each backend and victim: 30 in all."""

TRAIN_ROUNDED = ROUNDED.model_copy(
    update={"learning_rate": 1e-4, "batch_size": 2, "max_epochs": 40, "patience": 40, "checkpoint_seconds": 1}
)

pytestmark = [needs_sshd, pytest.mark.timeout(300)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    """Return two running hosts."""
    with start_hosts(tmp_path / "ssh", ["one", "two"]) as running:
        yield running


@pytest.mark.parametrize("victim", ["launcher", "launcher that is told to end", "agent", "rank"])
def test_ranks_on_hosts_end_with_launcher_and_agent(
    hosts: SshHosts, storage: Storage, tmp_path: Path, victim: str
) -> None:
    """15 s after the end of the launcher, an agent or a rank, neither ranks nor agents nor sessions are left."""
    left, spec = Leftovers(), fake_spec(hosts, storage, STEPS.format(home=storage.home))
    with start_launcher(spec, tmp_path / "spec.json") as launcher:
        ranks = rank_processes(storage)
        left.note([*processes_of(hosts), *psutil.Process(launcher.pid).children(recursive=True)])
        ended_at = time.monotonic()
        if victim == "launcher":
            launcher.kill()
        elif victim == "rank":
            ranks[2].kill()
        elif victim == "agent":
            parent = ranks[2].parent()
            assert parent is not None
            parent.kill()
        else:
            launcher.send_signal(signal.SIGINT)
        left.assert_none(ended_at)
        _, errors = launcher.communicate(timeout=120)
    wait_until(lambda: processes_of(hosts) == [])
    expected = {"launcher": "", "agent": "host 'two' is lost with rank 2", "rank": "rank 2 was ended by signal 9"}
    assert expected.get(victim, "KeyboardInterrupt") in errors


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_run_is_completed_after_a_cut_of_the_network(make_images, tmp_path: Path, draw, backend: str) -> None:
    """The host at the other end is lost with its rank, which ends as well; once the network is back, a run resumes."""
    cache = hand_made_cache(make_images(), f"{tmp_path}/cache")
    train = TRAIN.model_copy(update={"num_threads": 1, "max_epochs": 100, "patience": 100})
    other = resolve_storage(StorageConfig(home=str(tmp_path / "undisturbed")))
    local = DistributedConfig(num_ranks=2, backend=backend)
    undisturbed = launch_ranks(TrainingSpec(train=train, distributed=local, cache=cache, storage=other))
    expected = weights(undisturbed, other, tmp_path)
    for number in range(NUM_CUTS):
        own = resolve_storage(StorageConfig(home=f"{tmp_path}/home-{number}"))
        with hosts_apart(tmp_path / f"ssh-{number}") as (machine, hosts):
            distributed = settings(hosts, "one:1,two:1", backend=backend)
            spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=own)
            cut = _Cut(spec, hosts, machine, draw.uniform(0, 4))
            with pytest.raises(HostLost, match=r"^host 'two' is lost with rank 1 \(.*\); all ranks were ended"):
                launch_and(spec, cut)
            print(
                f"round {number}: cut {cut.seconds:.1f} s after a checkpoint, the launcher's end {cut.ago:.1f} s later"
            )
            assert len(cut.ranks) == 2
            _gone, alive = psutil.wait_procs(cut.ranks, timeout=60)
            assert alive == []
            machine.join()
            run = launch_ranks(spec)
            wait_until(partial(_has_none, programs_of, hosts), 15)
            if number == 0:
                # A session whose client is gone learns it when its next packet, after up to minutes, is answered.
                wait_until(partial(_has_none, processes_of, hosts), 240)
        found = weights(run, own, tmp_path)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert logged_epochs(run, own) == list(range(train.max_epochs))
        assert runs_beside(run, own) == [(run.run_id, "FINISHED")]


def _has_none(processes: Callable[[SshHosts], list[psutil.Process]], hosts: SshHosts) -> bool:
    return processes(hosts) == []


class _Cut:
    """A cut of the network between two hosts, some time after the first checkpoint of a training run."""

    def __init__(self, spec: TrainingSpec, hosts: SshHosts, machine: OtherMachine, seconds: float) -> None:
        self.seconds = seconds
        self.ranks: list[psutil.Process] = []
        """The ranks that ran at that moment."""
        self._spec = spec
        self._hosts = hosts
        self._machine = machine
        self._at = 0.0

    def __call__(self) -> None:
        """Wait for a checkpoint, and cut."""
        folder = self._spec.storage.checkpoints / self._spec.key
        wait_until(lambda: newest_position(folder) is not None)
        time.sleep(self.seconds)
        self.ranks.extend(ranks_of(self._spec.storage.home, processes_of(self._hosts)))
        self._machine.cut()
        self._at = time.monotonic()

    @property
    def ago(self) -> float:
        """Seconds since the cut."""
        return time.monotonic() - self._at


def resume(stopped: list[psutil.Process]) -> None:
    """Let stopped processes continue, and check that they end."""
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    _gone, alive = psutil.wait_procs(stopped, timeout=15)
    assert alive == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", ["rank", "agent", "stopped host", "sshd", "launcher"])
def test_run_is_completed_after_a_kill_at_a_random_moment(
    hosts: SshHosts, make_images, tmp_path: Path, draw, backend: str, victim: str
) -> None:
    """In one MLflow run, with the undisturbed weights: by the other host, by both again, or by the next launch.

    On a host that hangs, agent and rank end once it continues. Before, rank 0 there keeps the training run.
    """
    cache = hand_made_cache(make_images(), f"{tmp_path}/cache")
    other = resolve_storage(StorageConfig(home=f"{tmp_path}/undisturbed"))
    local = DistributedConfig(num_ranks=2, backend=backend)
    undisturbed = launch_ranks(TrainingSpec(train=TRAIN_ROUNDED, distributed=local, cache=cache, storage=other))
    expected = weights(undisturbed, other, tmp_path)
    assert expected["network.features.0.bias"].abs().max() > 1e-5  # It began at 0: how far training has moved it.
    distributed = settings(hosts, "one:1,two:1", backend=backend, max_restarts=3, min_ranks=1)
    for number in range(NUM_KILLS):
        own = resolve_storage(StorageConfig(home=f"{tmp_path}/home-{number}"))
        spec = TrainingSpec(train=TRAIN_ROUNDED, distributed=distributed, cache=cache, storage=own)
        left, ranks, stopped = Leftovers(), list[psutil.Process](), list[psutil.Process]()
        rank, seconds = draw.randrange(2), draw.uniform(0, 2)

        def kill(
            spec: TrainingSpec = spec,
            rank: int = rank,
            seconds: float = seconds,
            ranks: list[psutil.Process] = ranks,
            stopped: list[psutil.Process] = stopped,
        ) -> None:
            wait_until(lambda: newest_position(spec.storage.checkpoints / spec.key) is not None, 120)
            time.sleep(seconds)
            ranks.extend(ranks_of(spec.storage.home, processes_of(hosts)))
            chosen = next(one for one in ranks if rank_of(one) == rank)
            if victim == "sshd":
                for session in hosts.sessions(draw.choice(["one", "two"])):
                    session.kill()
            elif victim != "launcher":
                agent = chosen.parent() or chosen
                if victim == "stopped host":
                    stopped.extend([agent, chosen])
                    for process in stopped:
                        process.suspend()
                else:
                    (chosen if victim == "rank" else agent).kill()

        if victim == "launcher":
            with start_launcher(spec, tmp_path / "spec.json") as launcher:
                kill()
                left.note([*ranks, *psutil.Process(launcher.pid).children(recursive=True)])
                killed_at = time.monotonic()
                launcher.kill()
                left.assert_none(killed_at)
                launcher.communicate(timeout=60)
            run = launch_ranks(spec)
        elif victim == "stopped host" and rank == 0:
            with pytest.raises(TimeLimitExceeded, match=r"^another process still has this training run after 120 s"):
                launch_and(spec, kill)
            resume(stopped)
            run = launch_ranks(spec)
        else:
            run = launch_and(spec, kill)
        print(f"round {number}: {victim} (rank {rank}) {seconds:.1f} s after a checkpoint")
        assert len(ranks) == 2
        found = weights(run, own, tmp_path)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name
        assert logged_epochs(run, own) == list(range(TRAIN_ROUNDED.max_epochs))
        assert runs_beside(run, own) == [(run.run_id, "FINISHED")]
        resume(stopped)
        wait_until(lambda: processes_of(hosts) == [], 15)
