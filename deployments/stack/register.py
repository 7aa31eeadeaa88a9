"""One process that creates the work pools and the automation, and registers the deployments on a Prefect server.

Each of Prefect's commands takes seconds to start, and a stack would need five of them before it can run anything.
This process starts beside the server and waits for it.
"""

import json
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
from prefect.client.schemas.objects import ConcurrencyOptions, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import SCHEDULE_TYPES
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Crashed
from pydantic import BaseModel, TypeAdapter, ValidationError

from tasks.environment import lakevision_home
from tasks.errors import loggable

POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}
"""Default concurrency limit of each work pool: two training runs on the GPU of one machine would share its memory."""

REPORT_SECONDS = 15.0
"""Interval of the log lines that the server does not answer yet."""

UNFINISHED_STATES = ("RUNNING", "PENDING", "CANCELLING")
"""States of runs that a worker had picked up and that have not ended."""

HEARTBEAT_AUTOMATION = "lakevision: crash runs without a heartbeat"
"""Name of the automation that marks runs without a heartbeat as crashed."""

WAITING_AUTOMATION = "lakevision: skip scheduled runs that would wait"
"""Name of the automation that cancels scheduled runs while an earlier run of their deployment has not ended."""

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


def create_automation(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create an automation if it is missing; an existing one of its name keeps the user's settings."""
    if not client.read_automations_by_name(automation.name):
        client.create_automation(automation)


def crash_silent_runs(client: SyncPrefectClient, silence: timedelta = SILENCE) -> None:
    """Create the automation for runs without a heartbeat.

    Args:
        client: Client of the server.
        silence: Time without a heartbeat after which a run is marked as crashed.
    """
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
    create_automation(
        client, AutomationCore(name=HEARTBEAT_AUTOMATION, description=about, trigger=trigger, actions=[action])
    )


def skip_waiting_runs(client: SyncPrefectClient) -> None:
    """Create the automation for scheduled runs whose deployment is at its concurrency limit.

    A run that a user starts waits for the slot, as `collision_strategy` says; Prefect has no strategy by kind of run.
    """
    trigger = EventTrigger.model_validate(
        {
            "posture": Posture.Reactive,
            # Not a run that a user retries or resumes: it has run before, and waits.
            "match": {"prefect.resource.id": "prefect.flow-run.*", "prefect.run-count": "0"},
            "match_related": [
                {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
                for tag in ("auto-scheduled", "lakevision")
            ],
            "for_each": ["prefect.resource.id"],
            "expect": ["prefect.flow-run.AwaitingConcurrencySlot"],
            "threshold": 1,
            "within": timedelta(0),
        }
    )
    message = "The run before it has not ended; the next scheduled run does its work."
    action = ChangeFlowRunState(state=StateType.CANCELLED, name="Skipped", message=message)
    about = "Scheduled runs would pile up behind a run that takes longer than their interval."
    create_automation(
        client, AutomationCore(name=WAITING_AUTOMATION, description=about, trigger=trigger, actions=[action])
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
    """Settings of a deployment that users may edit; those of schedules are by slug.

    A field that is not set is unknown: an older release did not record it.
    """

    parameters: dict[str, Any] = {}
    description: str | None = None
    tags: list[str] = []
    paused: bool = False
    job_variables: dict[str, Any] = {}
    concurrency_limit: int | None = None
    concurrency_options: ConcurrencyOptions | None = None
    queue: dict[str, str | None] = {}
    """Names of the work pool and its queue."""
    schedules: dict[str, SCHEDULE_TYPES] = {}
    active: dict[str, bool] = {}
    schedule_parameters: dict[str, dict[str, Any]] = {}


Deployed = TypeAdapter(dict[str, DeploymentSettings])

QUEUE = {"work_pool_name", "work_queue_name"}

PLAIN = ("parameters", "description", "tags", "paused", "job_variables", "concurrency_options")
"""Settings that Prefect's responses and updates have under the same name."""


def own_deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return the deployments of this project, whose names another one of the user may have as well."""
    return [found for found in client.read_deployments() if str(found.entrypoint).startswith("flows.")]


def read_deployed(client: SyncPrefectClient) -> dict[str, DeploymentSettings]:
    """Return the settings of every deployment on the server, by name."""
    return {
        deployment.name: DeploymentSettings(
            **deployment.model_dump(include=set(PLAIN)),
            queue=deployment.model_dump(include=QUEUE),
            concurrency_limit=limit.limit if (limit := deployment.global_concurrency_limit) else None,
            schedules={entry.slug or "": entry.schedule for entry in deployment.schedules},
            active={entry.slug or "": entry.active for entry in deployment.schedules},
            schedule_parameters={entry.slug or "": entry.parameters for entry in deployment.schedules},
        )
        for deployment in own_deployments(client)
    }


def name_schedules(client: SyncPrefectClient) -> None:
    """Give the schedules that a user added a slug: deploying removes all schedules of a deployment if one has none."""
    for deployment in own_deployments(client):
        for entry in deployment.schedules:
            if entry.slug is None:
                client.update_deployment_schedule(
                    deployment.id, entry.id, parameters=entry.parameters, slug=f"added-{entry.id}"
                )


def before_interruption(
    now: DeploymentSettings, before: DeploymentSettings, resets: Sequence[DeploymentSettings]
) -> DeploymentSettings:
    """Return the settings that a user gave a deployment before or since a registration that was interrupted.

    Args:
        now: Settings on the server.
        before: Settings before the interrupted registration.
        resets: Settings to which it may have reset the deployment.
    """
    fields = {
        field: getattr(before if getattr(now, field) in [getattr(reset, field) for reset in resets] else now, field)
        for field in before.model_fields_set
    }
    return now.model_copy(update=fields)


def restore_edits(
    client: SyncPrefectClient, before: dict[str, DeploymentSettings], last: dict[str, DeploymentSettings]
) -> None:
    """Restore the user's edits, since deploying resets all settings to those of the file and pauses schedules.

    Schedules stay paused where the edited parameters are not valid any more: they would run those of the file.

    Args:
        client: Client of the server.
        before: Settings on the server before this deployment, by name.
        last: Settings as of the previous deployment, by name: those that are unchanged in `before` were not edited.
            Without them, parameters and schedules count as edited.
    """
    for deployment in own_deployments(client):
        was, given = before.get(deployment.name), last.get(deployment.name, DeploymentSettings())
        if was is None:
            continue
        active = was.active
        for field in (*PLAIN, "concurrency_limit", "queue"):
            edited = getattr(was, field)
            is_known = field in given.model_fields_set or field == "parameters"
            if not is_known or edited == getattr(given, field):
                continue
            update = DeploymentUpdate.model_validate(edited if field == "queue" else {field: edited})
            try:
                client.update_deployment(deployment.id, update)
            except (PrefectHTTPStatusError, ObjectNotFound) as error:  # of an older version, or of a pool that is gone
                problem = f"the edited {field} of '{deployment.name}' could not be restored: {loggable(error)}"
                if field == "parameters":
                    active = dict.fromkeys(was.active, False)
                    problem += ". Its schedules are paused"
                print(f"{problem}. The value was {loggable(json.dumps(edited, default=str))}", flush=True)
        for entry in deployment.schedules:
            slug = entry.slug or ""
            if slug not in was.active:
                continue
            kept_schedule = entry.schedule if was.schedules[slug] == given.schedules.get(slug) else was.schedules[slug]
            # An update without parameters would remove those of the schedule.
            wanted = (active[slug], kept_schedule, was.schedule_parameters.get(slug, {}))
            if wanted != (entry.active, entry.schedule, entry.parameters):
                client.update_deployment_schedule(
                    deployment.id, entry.id, active=wanted[0], schedule=wanted[1], parameters=wanted[2]
                )


def keep(file: Path, settings: dict[str, DeploymentSettings]) -> None:
    """Write settings to a file in one step: a killed process leaves the former content."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(Deployed.dump_json(settings, exclude_unset=True))
    partial.replace(file)


def kept(file: Path) -> dict[str, DeploymentSettings]:
    """Return the settings that `keep` wrote, or none; a file that an older release left cut is reported."""
    try:
        return Deployed.validate_json(file.read_bytes()) if file.exists() else {}
    except ValidationError:
        print(f"'{file}' is damaged: the settings on the server are kept as if they were edited", flush=True)
        return {}


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
        skip_waiting_runs(client)
        folder = lakevision_home() / "prefect"
        record, unfinished = folder / "deployed.json", folder / "edited.json"
        name_schedules(client)
        last, interrupted, before = kept(record), kept(unfinished), read_deployed(client)
        keep(unfinished, before | interrupted)
        importing.result()
        deploy_all()
        deployed = read_deployed(client)
        for name in before.keys() & interrupted.keys() & deployed.keys():
            resets = [deployed[name], last.get(name, deployed[name])]
            before[name] = before_interruption(before[name], interrupted[name], resets)
        restore_edits(client, before, last)
        unfinished.unlink()
        keep(record, deployed)
        if arguments:
            # Here: it loads MLflow, whose import takes seconds.
            from deployments.stack.reconcile import end_mlflow_runs

            end_mlflow_runs(client)


if __name__ == "__main__":
    main(sys.argv[1:])
