"""Work pools of the Prefect server: checks before work starts, and the runs that hold a pool's slots."""

from typing import Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import WorkerStatus
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL

from tasks.errors import WrongInput
from tasks.orchestration.pool_settings import PoolSettings, check_slots, worker_command

MAX_WORKERS = 200
"""Workers of a pool that are counted, those of the past included: the most that the server returns at once."""

HOLDING = ["PENDING", "RUNNING", "CANCELLING"]
"""States of runs that hold a slot of their pool."""


def where_to_run(settings: PoolSettings) -> Literal["work_pool", "in_place"]:
    """Return where the work runs: in place if no server is configured, as a temporary server has no workers."""
    if settings.where != "auto":
        return settings.where
    return "work_pool" if PREFECT_API_URL.value() else "in_place"


def read_pool(pool: str, group: str) -> tuple[int | None, int]:
    """Return a pool's concurrency limit, None for no limit, and the number of workers that poll it.

    Args:
        pool: Name of the pool.
        group: Group of settings that names it, for the error message.

    Raises:
        WrongInput: The server does not have the pool.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(pool)
        except ObjectNotFound:
            raise WrongInput(
                f"{group}.work_pool is '{pool}', which the Prefect server does not have",
                setting=f"{group}.work_pool",
                way_out=(
                    f"create it with 'prefect work-pool create {pool} --type process', or set {group}.where to in_place"
                ),
            ) from None
        workers = client.read_workers_for_work_pool(found.name, limit=MAX_WORKERS)
        return found.concurrency_limit, sum(worker.status == WorkerStatus.ONLINE for worker in workers)


def gpus_per_run(settings: PoolSettings) -> int | None:
    """Return the number of GPUs that the pool gives a run by default, -1 for all.

    None if runs of the pool choose none, or if the job variables of the deployment have a number.
    """
    with get_client(sync_client=True) as client:
        template = client.read_work_pool(settings.work_pool).base_job_template
        default = template.get("variables", {}).get("properties", {}).get("gpus", {}).get("default")
        if not isinstance(default, int):
            return None
        chosen = client.read_deployment_by_name(settings.deployment).job_variables
    return None if "gpus" in chosen else default


def check_deployment(settings: PoolSettings, group: str) -> None:
    """Check that the server has the deployment, and that its runs go to the configured pool.

    If they went to another pool, without workers, while the configured one has some, the wait would never end.

    Raises:
        WrongInput: The deployment does not exist, or belongs to another pool.
    """
    with get_client(sync_client=True) as client:
        try:
            runs_on = client.read_deployment_by_name(settings.deployment).work_pool_name
        except ObjectNotFound:
            raise WrongInput(
                f"{group}.deployment is '{settings.deployment}', which the Prefect server does not have",
                setting=f"{group}.deployment",
                way_out=(
                    "run 'prefect deploy --all --prefect-file deployments/prefect.yaml', or set "
                    f"{group}.where to in_place"
                ),
            ) from None
    if runs_on != settings.work_pool:
        where = f"the pool '{runs_on}'" if runs_on else "no pool"
        other = f"a deployment whose work_pool in deployments/prefect.yaml is '{settings.work_pool}'"
        raise WrongInput(
            f"{group}.work_pool is '{settings.work_pool}', but the runs of {group}.deployment '{settings.deployment}' "
            f"go to {where}",
            setting=f"{group}.work_pool",
            way_out=f"give that name, or {other}" if runs_on else f"give {other}",
        )


def own_pool() -> str | None:
    """Return the name of the work pool that the current flow run is on, or None if no worker runs it."""
    context = FlowRunContext.get()
    return context.flow_run.work_pool_name if context is not None and context.flow_run is not None else None


def check_pool(settings: PoolSettings, group: str, what: str) -> None:
    """Check deployment and pool, and log a warning if the pool has no worker, or too few slots for several parents.

    Raises:
        WrongInput: One of them does not exist, or this run has the only slot; the message has the way out.
    """
    check_deployment(settings, group)
    limit, num_workers = read_pool(settings.work_pool, group)
    log = get_run_logger()
    if warning := check_slots(settings.work_pool, limit, own_pool(), group, what):
        log.warning("%s", warning)
    if not num_workers:
        # Only a warning, since a worker may start later; the submitted run fails if none does.
        log.warning(
            "no worker polls the work pool '%s': start one with '%s' before %s begins",
            settings.work_pool,
            worker_command(settings.work_pool),
            what,
        )


def blocking_runs(client: SyncPrefectClient, pool: str) -> list[str]:
    """Return the names of the runs that hold the slots of a pool if all wait for other runs on it, else none."""
    on_pool = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})

    def find(states: list[str], **more: object) -> list[tuple[UUID, str]]:
        wanted = FlowRunFilter.model_validate({"state": {"type": {"any_": states}}, **more})
        return [(run.id, run.name) for run in client.read_flow_runs(flow_run_filter=wanted, work_pool_filter=on_pool)]

    holders = find(HOLDING)
    waiting = [find(["SCHEDULED"], parent_flow_run_id={"any_": [run]}) for run, _name in holders]
    return [name for _run, name in holders] if all(waiting) else []
