"""Training on a Spark cluster that loses a worker, and on this machine, in a driver: ranks_on_cluster.py SPEC LOCAL."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil

from tasks.launch.launcher import launch_ranks
from tasks.train.spec import TrainingSpec
from tests.builders.killed_ranks_on_cluster import victims_of


def parents_of_ranks(home: str) -> list[list[str]]:
    """Return the command lines of the parents of each rank of a home, up to the daemon of Spark's workers."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if "tasks.launch.start_rank" in command and home in Path(command[-1]).read_text():
                found.append([" ".join(parent.cmdline()) for parent in process.parents()[:3]])
        except (psutil.Error, OSError):
            continue
    return found


def main() -> None:
    """Train twice, and print the ids of both runs and the parents of the first ranks on the cluster.

    After its first epoch there, the worker of rank 1 is killed.
    """
    spec, local = (TrainingSpec.model_validate_json(text) for text in sys.argv[1:])
    home, parents = spec.storage.home, list[list[str]]()

    def kill_worker(_event: object) -> None:
        if not parents:
            os.kill(victims_of(home, "rank")[1], signal.SIGSTOP)  # Training does not end before the loss.
            parents.extend(parents_of_ranks(home))
            os.kill(victims_of(home, "worker")[1], signal.SIGKILL)

    remote = launch_ranks(spec, kill_worker)
    left = parents_of_ranks(home)
    here = launch_ranks(local)
    print(json.dumps({"remote": remote.run_id, "local": here.run_id, "parents": parents, "left": left}))


if __name__ == "__main__":
    main()
