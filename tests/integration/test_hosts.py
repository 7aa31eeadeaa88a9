"""Training on several hosts: sshds on this machine, and real agents, with real or fake ranks."""

import logging
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.errors import HostLost, WrongInput
from tasks.launch.code_version import code_folder
from tasks.launch.launcher import launch_ranks
from tasks.launch.restarts import RankFailed, Stopped
from tasks.refs import CacheRef
from tasks.storage import Storage, resolve_storage
from tasks.system.slots import take_gpus
from tasks.train.spec import TrainingSpec
from tests.builders.networks import hosts_apart
from tests.builders.spark_cluster import can_mount
from tests.builders.ssh_hosts import SshHosts, needs_sshd, start_hosts
from tests.builders.training_runs import SMALL, weights
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

pytestmark = [needs_sshd, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Return two running hosts."""
    with start_hosts(tmp_path_factory.mktemp("hosts") / "ssh", ["one", "two"]) as running:
        yield running


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_hosts_train_as_the_ranks_of_one_machine(
    cache: CacheRef, storage: Storage, hosts: SshHosts, tmp_path: Path, backend: str
) -> None:
    """Two ranks on one host and one on the other give the weights of three local ranks, and nothing is left."""
    train = SMALL.model_copy(update={"num_threads": 1, "max_epochs": 1})
    other = resolve_storage(StorageConfig(home=f"{tmp_path}/other"))
    local = launch_ranks(
        TrainingSpec(
            train=train, distributed=DistributedConfig(num_ranks=3, backend=backend), cache=cache, storage=other
        )
    )
    remote = launch_ranks(
        TrainingSpec(
            train=train, distributed=settings(hosts, "one:2,two:1", backend=backend), cache=cache, storage=storage
        )
    )
    expected, found = weights(local, other, tmp_path), weights(remote, storage, tmp_path)
    assert local.run_id != remote.run_id
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    wait_until(lambda: processes_of(hosts) == [])


def test_ranks_know_their_place(hosts: SshHosts, storage: Storage) -> None:
    """Ranks are numbered host by host, each host has its interface, and no value of a setting is on a command line."""
    program = f"""
names = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_GLOO_IFACE")
open({storage.home!r} + f"/place-{{number}}", "w").write(" ".join(os.environ[name] for name in names))
send({{"run_id": "r"}})
"""
    assert launch_ranks(fake_spec(hosts, storage, program)).run_id == "r"
    places = [Path(storage.home, f"place-{number}").read_text() for number in range(3)]
    assert places == ["0 2 0 2 lo", "1 2 0 1 lo", "0 1 1 2 lo"]


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        (
            "refused:1",
            WrongInput,
            r"^distributed.hosts has 'refused', and it accepts none",
        ),
        ("closed:1", HostLost, r"^host 'closed' is not reached \(.*refused.*\): "),
        (
            "no-such-host.invalid:1",
            WrongInput,
            r"'no-such-host.invalid', and its name is unknown",
        ),
    ],
)
def test_host_that_is_not_reached_is_named(
    hosts: SshHosts, storage: Storage, named: str, error: type[Exception], message: str
) -> None:
    """The error says which host and why, and the host that was reached has no process left."""
    with pytest.raises(error, match=message):
        launch_ranks(fake_spec(hosts, storage, "", f"one:1,{named}"))
    wait_until(lambda: processes_of(hosts) == [])


def test_host_whose_network_is_just_back_is_reached(storage: Storage, tmp_path: Path) -> None:
    """The kernel still looks for the host as it did before, and refuses a first connection when that search ends."""
    with (
        hosts_apart(tmp_path / "ssh") as (machine, hosts),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        for _ in range(5):
            machine.cut()
            sender.sendto(b"", (machine.address, 9))
            time.sleep(2.3)  # Linux asks three times, once per second, and then refuses what waits for an answer.
            machine.join()
            if machine.is_sought():  # On a busy machine, the search may have ended before the network was back.
                break
        else:
            pytest.fail("the kernel did not search for the host at any of five times when the network was back")
        assert launch_ranks(fake_spec(hosts, storage, 'send({"run_id": "r"})', "one:1,two:1")).run_id == "r"
        wait_until(lambda: programs_of(hosts) == [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"host_python": "/no/python"},
            r"has 'one', which cannot run '/no/python' \(.*\): ",
        ),
        (
            # An interpreter without this package: that of this environment finds it wherever the folder is.
            {"host_folder": "/nowhere", "host_python": f"{sys.base_prefix}/bin/python3"},
            r"has 'one', and its Python does not find this",
        ),
        (
            {"interface": "none0"},
            r"^host 'one' .* its interfaces are .*, not 'none0'",
        ),
    ],
)
def test_host_without_python_package_or_interface_is_named(
    hosts: SshHosts, storage: Storage, values: dict[str, str], message: str
) -> None:
    """The error names the host and the setting."""
    spec = fake_spec(hosts, storage, "")
    with pytest.raises(WrongInput, match=message):
        launch_ranks(spec.model_copy(update={"distributed": settings(hosts, "one:1,two:1", **values)}))


def test_other_version_of_the_code_is_refused(hosts: SshHosts, storage: Storage, tmp_path: Path) -> None:
    """One changed character is another version."""
    shutil.copytree(code_folder() / "tasks", tmp_path / "code" / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "code" / "tasks" / "refs.py"
    changed.write_text(changed.read_text() + "\n")
    spec = fake_spec(hosts, storage, "")
    distributed = settings(hosts, "one:1,two:1", host_folder=str(tmp_path / "code"))
    with pytest.raises(WrongInput, match=r"^host 'one' .* \(code \w+ there and \w+ here"):
        launch_ranks(spec.model_copy(update={"distributed": distributed}))


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_folder_that_is_not_shared_is_named(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with another file system at the same path is named, with the setting, and no file is left there."""
    monkeypatch.setattr("tasks.launch.shared_folders.SEE_SECONDS", 1)
    storage.checkpoints.mkdir(parents=True)
    with start_hosts(tmp_path / "ssh", ["one", "two"], hidden={"two": storage.checkpoints}) as own:
        with pytest.raises(WrongInput, match="this machine does not see what host 'two' writes") as refused:
            launch_ranks(fake_spec(own, storage, "", "one:1,two:1"))
        assert refused.value.setting == "storage.home"
    assert list(storage.checkpoints.glob(".lakevision-probe-*")) == []


@pytest.mark.fault
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_hosts_without_a_shared_folder_resume_from_the_checkpoint_of_either(
    cache: CacheRef, storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A host whose checkpoints are gone gets those of the other; the weights are those of an undisturbed run."""
    caplog.set_level(logging.INFO, "lakevision.ranks")
    train = SMALL.model_copy(update={"num_threads": 1, "batch_size": 4, "max_epochs": 40, "patience": 40})
    other = resolve_storage(StorageConfig(home=f"{tmp_path}/other"))
    local = launch_ranks(
        TrainingSpec(train=train, distributed=DistributedConfig(num_ranks=2), cache=cache, storage=other)
    )
    storage.checkpoints.mkdir(parents=True)
    stop = threading.Event()
    with start_hosts(tmp_path / "ssh", ["one", "two"], hidden={"two": storage.checkpoints}) as own:
        distributed = settings(own, "one:1,two:1", shared_home=False)
        spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage)
        with pytest.raises(Stopped):
            launch_ranks(spec, lambda _event: stop.set(), stop)
        assert list((storage.checkpoints / spec.key).glob("step-*.pt")) != []
        shutil.rmtree(storage.checkpoints / spec.key)
        caplog.clear()
        run = launch_ranks(spec)
        assert [message for message in caplog.messages if message.startswith("rank 0: resuming at epoch ")] != []
        wait_until(lambda: processes_of(own) == [])
    expected, found = weights(local, other, tmp_path), weights(run, storage, tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # All are removed but the last one, which more epochs can continue.
    assert list(storage.checkpoints.glob("*/*.pt")) == []


def test_shared_folder_is_named_where_each_host_should_have_its_own(hosts: SshHosts, storage: Storage) -> None:
    """Two hosts that write the same checkpoints would remove each other's files."""
    spec = fake_spec(hosts, storage, "")
    assert spec.distributed is not None
    distributed = spec.distributed.model_copy(update={"shared_home": False})
    with pytest.raises(WrongInput, match=r"host 'one' sees what host 'two' writes to '.*'") as refused:
        launch_ranks(spec.model_copy(update={"distributed": distributed}))
    assert refused.value.setting == "distributed.shared_home"
    assert list(storage.checkpoints.glob(".lakevision-probe-*")) == []


@pytest.mark.fault
def test_ranks_on_hosts_wait_for_gpus_of_their_own(
    hosts: SshHosts, storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four GPUs another run has two, so that the second host has none: the run waits until they are free."""
    caplog.set_level(logging.INFO, "lakevision.ranks")
    monkeypatch.setattr(tempfile, "tempdir", storage.home)

    def hold() -> None:
        with take_gpus(["GPU-a", "GPU-b"], 2, 0):
            waits = "waiting for GPUs of host 'two', which other training runs, or ranks that have not ended, use"
            wait_until(lambda: waits in caplog.messages)

    # Ranks have the locks of their GPUs as well, which are in use until they have ended.
    program = f"""
files = [os.path.realpath(f"/proc/self/fd/{{one}}") for one in os.listdir("/proc/self/fd")]
locks = sorted(os.path.basename(name) for name in files if name.endswith(".exclusive.lock"))
open({storage.home!r} + f"/gpus-{{number}}", "w").write(" ".join([os.environ["CUDA_VISIBLE_DEVICES"], *locks]))
send({{"run_id": "r"}})
"""
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d", "TMPDIR": storage.home}
    assert launch_and(fake_spec(hosts, storage, program, variables=variables), hold).run_id == "r"
    seen = [Path(storage.home, f"gpus-{number}").read_text() for number in range(3)]
    locks = [f"gpu-GPU-{name}.exclusive.lock" for name in "abc"]
    assert seen == [" ".join(["GPU-a,GPU-b", *locks[:2]])] * 2 + [f"GPU-c {locks[2]}"]


def test_lost_session_is_named_with_its_ranks(hosts: SshHosts, storage: Storage) -> None:
    """SIGKILL of one host's sshd session ends all ranks on both hosts, and the error names host and ranks."""
    ranks: list[psutil.Process] = []

    def kill() -> None:
        ranks.extend(rank_processes(storage))
        for session in hosts.sessions("one"):
            session.kill()

    spec = fake_spec(hosts, storage, STEPS.format(home=storage.home))
    with pytest.raises(HostLost, match=r"^host 'one' is lost with ranks 0, 1 \(.*\); all") as lost:
        launch_and(spec, kill)
    assert (lost.value.host, lost.value.ranks) == ("one", (0, 1))
    assert len(ranks) == 3
    _gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert alive == []


@pytest.mark.fault
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


@pytest.mark.fault
def test_host_whose_agent_is_told_to_end_is_lost(hosts: SshHosts, storage: Storage) -> None:
    """As at a shutdown of the host: ranks that end in order, with a status of their own, are lost all the same."""

    def end() -> None:
        agent = rank_processes(storage)[2].parent()
        assert agent is not None
        agent.terminate()

    program = f"signal.signal(signal.SIGTERM, lambda *_: os._exit(130))\n{STEPS.format(home=storage.home)}"
    with pytest.raises(
        HostLost, match=r"^host 'two' is lost with rank 2 \(its agent was ended by SIGTERM\); all ranks"
    ):
        launch_and(fake_spec(hosts, storage, program), end)
    wait_until(lambda: processes_of(hosts) == [])


@pytest.mark.fault
def test_ranks_of_a_lost_host_start_again_on_the_other(
    hosts: SshHosts, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rank is missing, the two others complete the run, and the log has one line about it."""

    def kill() -> None:
        rank_processes(storage)
        for session in hosts.sessions("two"):
            session.kill()

    steps = STEPS.format(home=storage.home).replace(
        "range(1000)", "range(1000 if os.environ['HOROVOD_SIZE'] == '3' else 0)"
    )
    spec = fake_spec(hosts, storage, f"{steps}\nsend({{'run_id': os.environ['HOROVOD_SIZE']}})")
    distributed = spec.distributed.model_copy(update={"max_restarts": 1, "min_ranks": 2})
    assert launch_and(spec.model_copy(update={"distributed": distributed}), kill).run_id == "2"
    told = [message for message in caplog.messages if "restarting" in message]
    assert len(told) == 1
    assert told[0].startswith("host 'two' is lost with rank 2 (")
    assert told[0].endswith("): restarting 2 ranks from the start (restart 1 of 1)")
    wait_until(lambda: processes_of(hosts) == [])


def test_killed_rank_on_a_host_is_named(hosts: SshHosts, storage: Storage) -> None:
    """The error names the rank and its signal, and shows its last lines."""

    def kill() -> None:
        rank_processes(storage)[2].kill()

    program = f"print('the last line', flush=True)\n{STEPS.format(home=storage.home)}"
    with pytest.raises(RankFailed, match=r"^rank 2 was ended by signal 9; its last lines:\nthe last line(\n|$)"):
        launch_and(fake_spec(hosts, storage, program), kill)
    wait_until(lambda: processes_of(hosts) == [])
