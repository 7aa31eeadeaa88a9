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
from prefect.states import Cancelled, Crashed
from prefect.workers.process import ProcessWorker

POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}
"""Work pools and how many runs of each may run at once: two trainings on one machine's GPU would share its memory."""

START_SECONDS = 120.0

LEFT = ("RUNNING", "PENDING", "CANCELLING")
"""States of runs that were under way."""


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


def cancel_orphans(client: SyncPrefectClient, began: datetime) -> None:
    """Cancel what an earlier stack's runs submitted and no worker took: nobody waits for it any more.

    Args:
        client: Of the server.
        began: When this stack began.
    """
    waiting = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
    for run in client.read_flow_runs(flow_run_filter=waiting):
        if run.parent_task_run_id is not None and run.created is not None and run.created < began:
            client.set_flow_run_state(run.id, Cancelled(message="the run that submitted it has ended"), force=True)


def read_switches(client: SyncPrefectClient) -> dict[tuple[str, str | None], bool]:
    """Return which schedules are switched on, by deployment and slug."""
    return {
        (deployment.name, schedule.slug): schedule.active
        for deployment in client.read_deployments()
        for schedule in deployment.schedules
    }


def restore_switches(client: SyncPrefectClient, before: dict[tuple[str, str | None], bool]) -> None:
    """Switch schedules as they were: to deploy makes them anew, paused, and a person may have resumed one."""
    for deployment in client.read_deployments():
        for schedule in deployment.schedules:
            wanted = before.get((deployment.name, schedule.slug), schedule.active)
            if wanted != schedule.active:
                client.update_deployment_schedule(deployment.id, schedule.id, active=wanted)


def deploy_all() -> None:
    """Deploy all of deployments/prefect.yaml with Prefect's own command.

    Raises:
        SystemExit: It failed.
    """
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
    try:
        runpy.run_module("prefect", run_name="__main__")
    except SystemExit as ended:  # How a command line ends, also a good one.
        if ended.code:
            raise


def main(arguments: Sequence[str]) -> None:
    """Make the pools, and deploy; schedules stay switched as they are.

    Args:
        arguments: Nothing, or the moment at which a stack began whose predecessor's runs are to be ended.
    """
    with get_client(sync_client=True) as client:
        wait_for_server(client)
        for began in map(datetime.fromisoformat, arguments):
            crash_abandoned_runs(client, began)
            cancel_orphans(client, began)
        make_pools(client)
        switches = read_switches(client)
        deploy_all()
        restore_switches(client, switches)


if __name__ == "__main__":
    main(sys.argv[1:])
