"""One process that creates the work pools and the automation, and registers the deployments on a Prefect server.

Each of Prefect's commands takes seconds to start, and a stack would need five of them before it can run anything.
This process starts beside the server and waits for it.
"""

import runpy
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import SCHEDULE_TYPES
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.states import Cancelled, Crashed
from pydantic import BaseModel, TypeAdapter

from tasks.environment import lakevision_home

POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}
"""Default concurrency limit of each work pool: two training runs on the GPU of one machine would share its memory."""

REPORT_SECONDS = 15.0
"""Interval of the log lines that the server does not answer yet."""

UNFINISHED_STATES = ("RUNNING", "PENDING", "CANCELLING")
"""States of runs that a worker had picked up and that have not ended."""

HEARTBEAT_AUTOMATION = "lakevision: crash runs without a heartbeat"
"""Name of the automation that marks runs without a heartbeat as crashed."""

SILENCE = timedelta(seconds=900)
"""Time without a heartbeat after which a run counts as lost: five of Prefect's default intervals. A machine that is
busy or unreachable for some minutes loses no run. The workers of this project send one every 30 s."""

HEARTBEAT = "prefect.flow-run.heartbeat"
SILENT_STATES = (
    "Completed", "Failed", "Cancelled", "Crashed",
    # Without a process: the run waits for an answer of a user, or for its next start.
    "Suspended", "Paused", "AwaitingRetry", "AwaitingConcurrencySlot", "Scheduled", "Late",
)  # fmt: skip
"""States of runs that send no heartbeats."""


def end_abandoned_runs(client: SyncPrefectClient, began: datetime) -> None:
    """Mark the runs that a killed stack left running as crashed: they would hold concurrency slots for ever.

    Runs that were being cancelled are marked as cancelled.

    Args:
        client: Client of the server.
        began: Start of this stack; runs whose state changed since then belong to its own workers.
    """
    unfinished = FlowRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED_STATES}}})
    for run in client.read_flow_runs(flow_run_filter=unfinished):
        if run.state is not None and run.state.timestamp >= began:
            continue
        ended = Cancelled if run.state is not None and run.state.is_cancelling() else Crashed
        client.set_flow_run_state(run.id, ended(message="its stack ended before it"), force=True)


def create_pools(client: SyncPrefectClient) -> None:
    """Create missing process pools with their concurrency limits; existing pools keep the user's settings."""
    from prefect.workers.process import ProcessWorker  # Here: the server imports this module for a name.

    template = ProcessWorker.get_default_base_job_template()
    for name, limit in POOLS.items():
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(
                WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
            )


def crash_silent_runs(client: SyncPrefectClient, silence: timedelta = SILENCE) -> None:
    """Create the automation if it is missing; an existing one keeps the user's settings.

    Args:
        client: Client of the server.
        silence: Time without a heartbeat after which a run is marked as crashed.
    """
    if client.read_automations_by_name(HEARTBEAT_AUTOMATION):
        return
    trigger = EventTrigger.model_validate(
        {
            "posture": Posture.Proactive,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "for_each": ["prefect.resource.id"],
            "after": [HEARTBEAT],
            "expect": [HEARTBEAT, *(f"prefect.flow-run.{state}" for state in SILENT_STATES)],
            "threshold": 1,
            "within": silence,
        }
    )
    message = f"It has sent no heartbeat for {silence.total_seconds():.0f} s: its process, worker or machine is gone."
    action = ChangeFlowRunState(state=StateType.CRASHED, message=message)
    about = "A run whose machine is gone would stay Running, and keep its slot."
    client.create_automation(
        AutomationCore(name=HEARTBEAT_AUTOMATION, description=about, trigger=trigger, actions=[action])
    )


def import_deployed() -> None:
    """Import the modules that `deploy_all` needs, which takes seconds, while the server starts.

    The command imports the flows' files again, but finds the modules that they import loaded.
    """
    for file in sorted(Path("flows").glob("*.py")):
        import_module(f"flows.{file.stem}")
    import_module("prefect.cli.deploy")


def wait_for_server(client: SyncPrefectClient) -> None:
    """Wait until the server answers, without a timeout: a stack whose server ends stops this process."""
    last_report = time.monotonic()
    while (error := client.api_healthcheck()) is not None:
        if time.monotonic() - last_report >= REPORT_SECONDS:
            last_report = time.monotonic()
            print(f"waiting for the Prefect server at {client.api_url}: {error}", flush=True)
        time.sleep(0.3)


def cancel_orphans(client: SyncPrefectClient, began: datetime) -> None:
    """Cancel scheduled runs that an earlier stack's runs submitted: their parent runs have ended.

    Args:
        client: Client of the server.
        began: Start of this stack.
    """
    scheduled = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
    for run in client.read_flow_runs(flow_run_filter=scheduled):
        if run.parent_task_run_id is not None and run.created is not None and run.created < began:
            client.set_flow_run_state(run.id, Cancelled(message="the run that submitted it has ended"), force=True)


class DeploymentSettings(BaseModel):
    """Settings of a deployment that users may edit: its parameters, and by slug its schedules and which are active."""

    parameters: dict[str, Any]
    schedules: dict[str, SCHEDULE_TYPES]
    active: dict[str, bool]


Deployed = TypeAdapter(dict[str, DeploymentSettings])


def read_deployed(client: SyncPrefectClient) -> dict[str, DeploymentSettings]:
    """Return the settings of every deployment on the server, by name."""
    return {
        deployment.name: DeploymentSettings(
            parameters=deployment.parameters,
            schedules={entry.slug or "": entry.schedule for entry in deployment.schedules},
            active={entry.slug or "": entry.active for entry in deployment.schedules},
        )
        for deployment in client.read_deployments()
    }


def restore_edits(
    client: SyncPrefectClient, before: dict[str, DeploymentSettings], last: dict[str, DeploymentSettings]
) -> None:
    """Restore the user's edits, since deploying resets all settings to those of the file and pauses schedules.

    Args:
        client: Client of the server.
        before: Settings on the server before this deployment, by name.
        last: Settings as of the previous deployment, by name: those that are unchanged in `before` were not edited.
    """
    for deployment in client.read_deployments():
        was, given = before.get(deployment.name), last.get(deployment.name)
        if was is None:
            continue
        if given is not None and was.parameters != given.parameters:
            try:
                client.update_deployment(deployment.id, DeploymentUpdate(parameters=was.parameters))
            except PrefectHTTPStatusError as error:  # stored by an older version, which had other settings
                print(f"the edited parameters of '{deployment.name}' could not be restored: {error}", flush=True)
        for entry in deployment.schedules:
            slug = entry.slug or ""
            if slug not in was.active:
                continue
            edited = given is not None and was.schedules[slug] != given.schedules.get(slug)
            schedule = was.schedules[slug] if edited else None
            if edited or was.active[slug] != entry.active:
                client.update_deployment_schedule(deployment.id, entry.id, active=was.active[slug], schedule=schedule)


def deploy_all() -> None:
    """Deploy all of deployments/prefect.yaml with `prefect deploy`.

    Raises:
        SystemExit: The command failed.
    """
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
    try:
        runpy.run_module("prefect", run_name="__main__")
    except SystemExit as exited:  # A CLI raises it on success, too.
        if exited.code:
            raise


def main(arguments: Sequence[str]) -> None:
    """Create pools and automation, and deploy; the user's edits are kept.

    Args:
        arguments: Empty, or the start of a stack (ISO 8601), before which all runs of its predecessor are ended.
    """
    # Imported in parallel with the first requests: a delay would let workers pick up the runs that are cancelled here.
    with ThreadPoolExecutor() as threads, get_client(sync_client=True) as client:
        importing = threads.submit(import_deployed)
        wait_for_server(client)
        for began in map(datetime.fromisoformat, arguments):
            end_abandoned_runs(client, began)
            cancel_orphans(client, began)
        create_pools(client)
        crash_silent_runs(client)
        record = lakevision_home() / "prefect" / "deployed.json"
        last = Deployed.validate_json(record.read_bytes()) if record.exists() else {}
        before = read_deployed(client)
        importing.result()
        deploy_all()
        deployed = read_deployed(client)
        restore_edits(client, before, last)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_bytes(Deployed.dump_json(deployed))
        if arguments:
            # Here: it loads MLflow, whose import takes seconds.
            from deployments.stack.reconcile import end_mlflow_runs

            end_mlflow_runs(client)


if __name__ == "__main__":
    main(sys.argv[1:])
