"""A process that submits a distributed training run per line on stdin, as the DAG does: `submission_runs.py - HOME`.

It answers with the seconds from the submission to the first step of rank 0, by cause. They are differences of
timestamps that Prefect's server has of the submitted run: its states, its log, and in it rank 0's line about its start.
"""

import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from uuid import UUID

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect.client.schemas.objects import Log, StateType
from prefect.client.schemas.sorting import LogSort
from prefect.runtime import flow_run

from tasks.cache.write import FILE_BYTES
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.launch.task import submit_train_distributed
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tests.benchmarks.submission import BATCH, MODEL, NUM_CLASSES, SIDE
from tests.builders import caches

ROWS = {"train": 8 * BATCH, "val": BATCH, "test": BATCH}
LOG_SECONDS = 60.0
"""Time within which the server has the whole log of a run that has ended."""
FIRST_STEP = re.compile(r"rank 0: first step ([\d.]+) s after the start of this process: (.*)")


def write_cache(home: str) -> CacheRef:
    """Write a cache of noise."""
    settings = CacheConfig(image_size=SIDE)
    return caches.write_cache(
        f"{home}/cache/bench",
        ROWS,
        lambda split, row: (caches.noise(row, SIDE), row % NUM_CLASSES),
        [f"class{number}" for number in range(NUM_CLASSES)],
        settings,
        rows_per_group=BATCH,
        groups_per_file=max(1, FILE_BYTES // (BATCH * settings.pixel_bytes)),
    )


@flow
def submits(cache: CacheRef, seed: int) -> tuple[str, float]:
    """Train on the work pool; return the id of this run, and the time of the submission."""
    train = TrainConfig(
        model=MODEL,
        weights="none",
        freeze_backbone=False,
        batch_size=BATCH,
        max_epochs=1,
        seed=seed,
        device="cpu",
    )
    submitted = time.time()
    run_stage(submit_train_distributed, train, DistributedConfig(num_ranks=2), cache, resolve_storage(StorageConfig()))
    return str(flow_run.get_id()), submitted


def read_log(client: SyncPrefectClient, run: UUID) -> list[Log]:
    """Return the log of a run, once it has the line about the first step."""
    deadline = time.monotonic() + LOG_SECONDS
    wanted = LogFilter.model_validate({"flow_run_id": {"any_": [run]}})
    while time.monotonic() < deadline:
        lines = client.read_logs(wanted, sort=LogSort.TIMESTAMP_ASC, limit=200)
        if any(FIRST_STEP.match(line.message) for line in lines):
            return lines
        time.sleep(0.5)
    raise RuntimeError(f"the log of the run {run} has no line about the first step")


def find_causes(parent: str, submitted: float) -> dict[str, float]:
    """Return the seconds from the submission to the first step, by cause, and of the whole."""
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [parent]}})
        )
        began: dict[StateType, float] = {}
        for state in sorted(client.read_flow_run_states(run.id), key=lambda state: state.timestamp):
            began.setdefault(state.type, state.timestamp.timestamp())
        log = read_log(client, run.id)
    prepares = next(line.timestamp.timestamp() for line in log if "deployment pull step" in line.message)
    stepped, found = next(
        (line.timestamp.timestamp(), match) for line in log if (match := FIRST_STEP.match(line.message))
    )
    ends = {
        "submission": began[StateType.SCHEDULED],
        "poll of the worker": began[StateType.PENDING],
        "start of Prefect's supervisor": prepares,
        "imports of the flow run": began[StateType.RUNNING],
        "flow run until its ranks start": stepped - float(found[1]),
    }
    times = pairwise([submitted, *ends.values()])
    causes = {name: end - begin for name, (begin, end) in zip(ends, times, strict=True)}
    parts = {f"rank, {name}": float(value) for name, value in re.findall(r"(\w+) ([\d.]+) s", found[2])}
    return causes | parts | {"whole": stepped - submitted}


def main() -> None:
    """Submit a run per line on stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr
    cache = write_cache(sys.argv[2])
    for number, _line in enumerate(sys.stdin, 1):
        print(json.dumps(find_causes(*submits(cache, seed=number))), file=answers, flush=True)


if __name__ == "__main__":
    main()
