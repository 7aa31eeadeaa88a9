"""Make the work pools and register the deployments on the server of $PREFECT_API_URL, in one process.

Each of Prefect's commands costs seconds to start, and a stack needs five of them before it can run anything; this one
starts beside the server and waits for it.
"""

import runpy
import sys
import time
from collections.abc import Sequence
from datetime import datetime

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}
"""Work pools and how many runs of each may run at once: two trainings on one machine's GPU would share its memory."""

START_SECONDS = 120.0

LEFT = ("RUNNING", "PENDING", "CANCELLING")


def crash_abandoned_runs(client: SyncPrefectClient, began: datetime) -> None:
    """Mark runs as crashed that a killed stack left running: they would hold their slots, and later runs wait.

    Args:
        client: Of the server.
        began: When this stack began; what changed its state since is the work of this stack's workers.
    """
    left = FlowRunFilter.model_validate({"state": {"type": {"any_": LEFT}}})
    for run in client.read_flow_runs(flow_run_filter=left):
        if run.state is not None and run.state.timestamp >= began:
            continue
        client.set_flow_run_state(run.id, Crashed(message="its stack ended before it"), force=True)


def make_pools(client: SyncPrefectClient) -> None:
    """Create the process pools that are missing, and set their limits."""
    template = ProcessWorker.get_default_base_job_template()
    for name, limit in POOLS.items():
        try:
            client.create_work_pool(
                WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
            )
        except ObjectAlreadyExists:
            client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))


def wait_for_server(client: SyncPrefectClient) -> None:
    """Wait until the server answers.

    Raises:
        Exception: What the last attempt gave, after START_SECONDS.
    """
    deadline = time.monotonic() + START_SECONDS
    while (error := client.api_healthcheck()) is not None:
        if time.monotonic() > deadline:
            raise error
        time.sleep(0.3)


def main(arguments: Sequence[str]) -> None:
    """Make the pools, then deploy all of deployments/prefect.yaml with Prefect's own command.

    Args:
        arguments: Nothing, or the moment at which a stack began whose predecessor's runs are to be crashed.
    """
    with get_client(sync_client=True) as client:
        wait_for_server(client)
        for began in arguments:
            crash_abandoned_runs(client, datetime.fromisoformat(began))
        make_pools(client)
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
    runpy.run_module("prefect", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
