"""Fake ranks on hosts that ssh reaches, for tests of agents and launcher without training."""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.launch.launcher import launch_ranks
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec
from tests.builders.processes import ROOT
from tests.builders.ssh_hosts import SshHosts

STEPS = """
open({home!r} + f"/pid-{{number}}", "w").write(str(os.getpid()))
for count in range(1000):
    send({{"activity": ["training", "step", 2, count, count]}})
    time.sleep(0.5)
"""


def settings(hosts: SshHosts, named: str, **values: object) -> DistributedConfig:
    """Return settings with one rank per slot."""
    num_ranks = sum(int(place.split(":")[1]) for place in named.split(","))
    return DistributedConfig(num_ranks=num_ranks, launcher="hosts", hosts=named, ssh_config=str(hosts.config), **values)


def fake_spec(
    hosts: SshHosts, storage: Storage, program: str, named: str = "one:2,two:1", variables: Mapping[str, str] = {}
) -> TrainingSpec:
    """Return a training run whose hosts run a program in place of each rank, in which `send` sends an event.

    Args:
        hosts: The hosts.
        storage: Its storage.
        program: Source of the program.
        named: The hosts that take part, with their numbers of ranks.
        variables: Environment of the agents.
    """
    Path(storage.home).mkdir(parents=True, exist_ok=True)
    folder = Path(storage.home).parent
    python = folder / "python"
    python.write_text(f"""#!{sys.executable}
import json, os, runpy, signal, sys, threading, time
sys.executable = {str(python)!r}
if "tasks.launch.host_agent" in sys.argv:
    os.environ.update({dict(variables)!r})
    runpy.run_module("tasks.launch.host_agent", run_name="__main__", alter_sys=True)
descriptor, number = int(sys.argv[-2]), int(os.environ["HOROVOD_RANK"])
def send(event):
    os.write(descriptor, f"{{json.dumps(event)}}\\n".encode())
sys.path.insert(0, {str(ROOT)!r})
from tasks.launch.start_rank import end_with_parent
end_with_parent()
{program}
os._exit(0)
""")
    python.chmod(0o755)
    return TrainingSpec(
        train=TrainConfig(weights="none", freeze_backbone=False),
        distributed=settings(hosts, named, host_python=str(python)),
        cache=CacheRef(url=str(folder / "cache"), digest="digest"),
        storage=storage,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold in time"
        time.sleep(0.1)


def processes_of(hosts: SshHosts) -> list[psutil.Process]:
    """Return agents, ranks and sessions on both hosts."""
    return [process for name in hosts.servers for process in hosts.processes(name)]


def programs_of(hosts: SshHosts) -> list[psutil.Process]:
    """Return agents and ranks on both hosts, without the sessions, which end when sshd learns that they are lost."""
    found = []
    for process in processes_of(hosts):
        with suppress(psutil.NoSuchProcess):
            if not process.name().startswith("sshd"):
                found.append(process)
    return found


def rank_processes(storage: Storage, num_ranks: int = 3) -> list[psutil.Process]:
    """Return the processes of the fake ranks once all run."""
    files = [Path(storage.home, f"pid-{number}") for number in range(num_ranks)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [psutil.Process(int(file.read_text())) for file in files]


def launch_and(spec: TrainingSpec, act: Callable[[], None]) -> RunRef:
    """Train with fake ranks, and act in a thread meanwhile; return the run."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        return launch_ranks(spec)
    finally:
        thread.join()
