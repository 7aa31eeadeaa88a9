"""Training with the tasks of a Spark cluster and on this machine, in a driver: ranks_on_cluster.py SPEC LOCAL_SPEC."""

import json
import sys
from pathlib import Path

import psutil

from tasks.launch.launcher import launch_ranks
from tasks.train.spec import TrainingSpec


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
    """Train twice, and print the ids of both runs and the parents of the ranks on the cluster."""
    spec, local = (TrainingSpec.model_validate_json(text) for text in sys.argv[1:])
    parents: list[list[str]] = []
    remote = launch_ranks(spec, lambda _event: parents.extend(parents_of_ranks(spec.storage.home)))
    left = parents_of_ranks(spec.storage.home)
    here = launch_ranks(local)
    print(json.dumps({"remote": remote.run_id, "local": here.run_id, "parents": parents, "left": left}))


if __name__ == "__main__":
    main()
