"""The Spark task that runs an agent on an executor; it sends and receives no data of the training run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from pyspark import BarrierTaskContext


@dataclass(frozen=True)
class Invitation:
    """The settings of an agent that connects to its launcher, on its stdin; `number` and the following are the task's.

    The secret and the environment are in no command line and on no connection other than Spark's own.
    """

    host: str
    port: int
    secret: str
    environment: dict[str, str]
    number: int = 0
    cores: int = 1
    """Cores of the task, spark.task.cpus."""
    gpus: list[str] = field(default_factory=list)
    """Addresses of the GPUs that Spark has assigned to the task."""


def run_agent(invitation: Invitation, _rows: Iterable[object]) -> Iterator[int]:
    """Run an agent until it ends, and yield the number of the task.

    Raises:
        RuntimeError: It ended with an error, which is in the log of the executor.
    """
    context = BarrierTaskContext.get()
    gpus = context.resources().get("gpu")
    given = asdict(invitation) | {
        "number": context.partitionId(),
        "cores": context.cpus(),
        "gpus": [] if gpus is None else list(gpus.addresses),
    }
    # Spark's archives are left out: each import would search their lists of files.
    folders = [path for path in sys.path if os.path.isdir(path)]
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.launch.host_agent", "--connect"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    assert agent.stdin is not None
    # The pipe stays open: the agent ends when this worker does.
    agent.stdin.write(f"{json.dumps(given)}\n".encode())
    agent.stdin.flush()
    if status := agent.wait():
        raise RuntimeError(f"the agent of rank {given['number']} ended with status {status}")
    yield context.partitionId()
