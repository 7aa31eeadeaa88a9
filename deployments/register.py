"""Make the work pools and register the deployments on the server of $PREFECT_API_URL, in one process.

Each of Prefect's commands costs seconds to start, and a stack needs five of them before it can run anything; this one
starts beside the server and waits for it.
"""

import runpy
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.schedules import SCHEDULE_TYPES
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.states import Cancelled, Crashed
from prefect.workers.process import ProcessWorker
from pydantic import BaseModel, TypeAdapter

from tasks.environment import lakevision_home

POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}
"""Work pools, and how many runs of each may run at once where nobody says otherwise: two trainings on one machine's GPU
would share its memory."""

SAY_SECONDS = 15.0
"""How often the log says that the server does not answer yet."""

LEFT = ("RUNNING", "PENDING", "CANCELLING")
"""States of runs that were under way."""


def end_abandoned_runs(client: SyncPrefectClient, began: datetime) -> None:
    """Mark runs as crashed that a killed stack left running: they would hold their slots, and later runs wait.

    Those that were being cancelled are marked as cancelled.

    Args:
        client: Of the server.
        began: When this stack began; what changed its state since is the work of this stack's workers.
    """
    left = FlowRunFilter.model_validate({"state": {"type": {"any_": LEFT}}})
    for run in client.read_flow_runs(flow_run_filter=left):
        if run.state is not None and run.state.timestamp >= began:
            continue
        ended = Cancelled if run.state is not None and run.state.is_cancelling() else Crashed
        client.set_flow_run_state(run.id, ended(message="its stack ended before it"), force=True)


def make_pools(client: SyncPrefectClient) -> None:
    """Create the process pools that are missing, with their limits; those that are there stay as a person has them."""
    template = ProcessWorker.get_default_base_job_template()
    for name, limit in POOLS.items():
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(
                WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
            )


def import_deployed() -> None:
    """Import what `deploy_all` needs, which takes seconds: done while the server starts, it costs little time.

    The command imports the flows' files anew; what they import is there by then.
    """
    for file in sorted(Path("flows").glob("*.py")):
        import_module(f"flows.{file.stem}")
    import_module("prefect.cli.deploy")


def wait_for_server(client: SyncPrefectClient) -> None:
    """Wait until the server answers, however long its start takes; a stack that loses its server ends this process."""
    told = time.monotonic()
    while (error := client.api_healthcheck()) is not None:
        if time.monotonic() - told >= SAY_SECONDS:
            told = time.monotonic()
            print(f"waiting for the Prefect server at {client.api_url}: {error}", flush=True)
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


class DeploymentSettings(BaseModel):
    """What a person may edit of a deployment: its parameters, and by slug its schedules and which are on."""

    parameters: dict[str, Any]
    schedules: dict[str, SCHEDULE_TYPES]
    active: dict[str, bool]


Deployed = TypeAdapter(dict[str, DeploymentSettings])


def read_deployed(client: SyncPrefectClient) -> dict[str, DeploymentSettings]:
    """Return what the server holds of every deployment, by name."""
    return {
        deployment.name: DeploymentSettings(
            parameters=deployment.parameters,
            schedules={made.slug or "": made.schedule for made in deployment.schedules},
            active={made.slug or "": made.active for made in deployment.schedules},
        )
        for deployment in client.read_deployments()
    }


def restore_edits(
    client: SyncPrefectClient, before: dict[str, DeploymentSettings], last: dict[str, DeploymentSettings]
) -> None:
    """Bring back what a person edited: to deploy makes everything as the file has it, and schedules paused.

    Args:
        client: Of the server.
        before: What the server held.
        last: What it was given when it was last deployed: parameters and schedules that are still so, nobody edited.
    """
    for deployment in client.read_deployments():
        was, given = before.get(deployment.name), last.get(deployment.name)
        if was is None:
            continue
        if given is not None and was.parameters != given.parameters:
            try:
                client.update_deployment(deployment.id, DeploymentUpdate(parameters=was.parameters))
            except PrefectHTTPStatusError as error:  # stored by an older version, which had other settings
                print(f"the edited parameters of '{deployment.name}' are not taken over: {error}", flush=True)
        for made in deployment.schedules:
            slug = made.slug or ""
            if slug not in was.active:
                continue
            edited = given is not None and was.schedules[slug] != given.schedules.get(slug)
            schedule = was.schedules[slug] if edited else None
            if edited or was.active[slug] != made.active:
                client.update_deployment_schedule(deployment.id, made.id, active=was.active[slug], schedule=schedule)


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
    """Make the pools, and deploy; what a person edited stays.

    Args:
        arguments: Nothing, or the moment at which a stack began whose predecessor's runs are to be ended.
    """
    # Beside what is first asked of the server: workers would take the runs that are cancelled here.
    with ThreadPoolExecutor() as threads, get_client(sync_client=True) as client:
        importing = threads.submit(import_deployed)
        wait_for_server(client)
        for began in map(datetime.fromisoformat, arguments):
            end_abandoned_runs(client, began)
            cancel_orphans(client, began)
        make_pools(client)
        record = lakevision_home() / "prefect" / "deployed.json"
        last = Deployed.validate_json(record.read_bytes()) if record.exists() else {}
        before = read_deployed(client)
        importing.result()
        deploy_all()
        deployed = read_deployed(client)
        restore_edits(client, before, last)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_bytes(Deployed.dump_json(deployed))


if __name__ == "__main__":
    main(sys.argv[1:])
