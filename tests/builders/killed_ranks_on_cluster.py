"""Training with the tasks of a Spark cluster while one of its processes is killed, in a driver of its own.

Call: killed_ranks_on_cluster.py SPEC VICTIM SEED, where VICTIM is the name of a process (`VICTIMS`).
"""

import json
import random
import sys
import time
from contextlib import suppress

import psutil

from tasks.train.spec import TrainingSpec
from tests.builders.killed_training import launch_and_kill, rank_of
from tests.builders.leftovers import Leftovers
from tests.builders.processes import rank_processes

VICTIMS = {
    "rank": "tasks.launch.start_rank",
    "agent": "tasks.launch.host_agent",
    "executor": "CoarseGrainedExecutorBackend",
    "worker": "org.apache.spark.deploy.worker.Worker",
}
"""A part of the command line of each process that can be killed: a rank, or an ancestor of a rank."""


def victims_of(home: str, name: str) -> dict[int, int]:
    """Return the process ids of the victim of each rank of a home, by the number of the rank."""
    found = {}
    for process in rank_processes(home):
        with suppress(psutil.Error):  # It ended meanwhile.
            for one in (process, *process.parents()):
                if any(VICTIMS[name] in part for part in one.cmdline()):
                    found[rank_of(process)] = one.pid
                    break
    return found


def main() -> None:
    """Train, kill, and print the rank, the id of the MLflow run, and the number of processes that are left."""
    spec, name, seed = TrainingSpec.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3]
    home, left = spec.storage.home, Leftovers()

    def find() -> dict[int, int]:
        left.note(rank_processes(home))
        return victims_of(home, name)

    victim = launch_and_kill(spec, random.Random(seed), find=find)
    assert victim.run is not None, victim.message
    left.assert_none(time.monotonic())
    print(json.dumps({"rank": victim.rank, "run": victim.run.run_id, "left": len(rank_processes(home))}))


if __name__ == "__main__":
    main()
