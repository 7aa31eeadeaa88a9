"""The truth about runs whose process is gone: their states on the Prefect server, and their MLflow runs."""

import socket
import threading
from collections.abc import Iterator
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from tasks.config.storage import StorageConfig
from tasks.errors import join_names, loggable
from tasks.orchestration.pools import HOLDING
from tasks.orchestration.stage import HOST_LABEL
from tasks.storage import Storage, resolve_storage
from tasks.tracking import runs
from tasks.tracking.runs import EndStatus

WORKER_LABEL = "prefect.worker.name"
"""Label by which Prefect's workers name themselves at a run before they start it."""

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable by which Prefect tells a process its flow run; the processes that it starts inherit it."""

MLFLOW_SECONDS = 60.0
"""Time limit for all tracking servers together: a worker must start although servers of earlier runs are gone."""


def runs_here() -> tuple[set[str], set[str]]:
    """Return the ids of the flow runs that have a process on this machine, and the ids of unreadable processes."""
    found, unreadable = set(), set()
    for process in psutil.process_iter():
        try:
            found.add(process.environ().get(RUN_VARIABLE, ""))
        except psutil.AccessDenied:
            unreadable.add(str(process.pid))  # of another user, who may have a worker, too
        except psutil.Error:
            continue  # it has ended meanwhile
    return found - {""}, unreadable


def lost_runs(client: SyncPrefectClient, pool: str, worker: str) -> Iterator[FlowRun]:
    """Yield the unfinished runs of a pool that have no process any more, as far as this machine can know it.

    A run names the machine on which its process began. Until then it belongs to the worker that took it. That worker is
    gone if `worker` has its name, or, for a run that never began, if no other worker polls the pool. All other runs are
    left to their heartbeats.

    Args:
        client: Client of the server.
        pool: Name of the pool.
        worker: Name of the worker that is about to start here.
    """
    alive, unreadable = runs_here()
    unfinished = FlowRunFilter.model_validate({"state": {"type": {"any_": HOLDING}}})
    on_pool = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    found = client.read_flow_runs(flow_run_filter=unfinished, work_pool_filter=on_pool)
    workers = client.read_workers_for_work_pool(pool) if found else []
    alone = not any(other.status == WorkerStatus.ONLINE and other.name != worker for other in workers)
    for run in found:
        host = run.labels.get(HOST_LABEL)
        if host is None:
            is_own = run.labels.get(WORKER_LABEL) == worker or (alone and run.start_time is None)
        else:
            is_own = host == socket.gethostname()
        if is_own and str(run.id) not in alive and run.infrastructure_pid not in unreadable:
            yield run


def end_lost_runs(client: SyncPrefectClient, pool: str, worker: str) -> None:
    """End the runs of `lost_runs`, which frees their slots: as crashed, or cancelled if they were being cancelled."""
    for run in lost_runs(client, pool, worker):
        ended = Cancelled if run.state is not None and run.state.is_cancelling() else Crashed
        client.set_flow_run_state(run.id, ended(message="its worker ended before it"), force=True)
        print(f"the run '{run.name}' has no process any more: marked as {ended().name}", flush=True)


def _storages_of_runs(client: SyncPrefectClient, pool: str | None) -> list[Storage]:
    """Return the storage of this environment, and those that runs of a pool, or all, were given and did not complete.

    Of storages with the same tracking URI, only the first one; at most 200 runs, the newest ones, are looked at.
    """
    ended = FlowRunFilter.model_validate({"state": {"type": {"any_": ["CRASHED", "CANCELLED", "FAILED"]}}})
    on_pool = None if pool is None else WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    found = client.read_flow_runs(flow_run_filter=ended, work_pool_filter=on_pool, sort=FlowRunSort.END_TIME_DESC)
    default = resolve_storage(StorageConfig())
    storages = {default.tracking: default}
    for run in found:
        config = run.parameters.get("config")
        given = config.get("storage") if isinstance(config, dict) else None
        try:
            storage = resolve_storage(StorageConfig.model_validate(given or {}))
        except ValueError:  # An invalid storage, with which no run has begun.
            continue
        storages.setdefault(storage.tracking, storage)
    return list(storages.values())


def end_mlflow_runs(client: SyncPrefectClient, pool: str | None = None) -> None:
    """End the MLflow runs that are still running although their flow run has ended, where the tracking server answers.

    The next start continues where MLFLOW_SECONDS were not enough.

    Args:
        client: Client of the server.
        pool: Name of the pool whose runs name further storages; None for all.
    """
    storages = _storages_of_runs(client, pool)
    left = [storage.tracking_shown for storage in storages]

    def end() -> None:
        for storage in storages:
            _end_mlflow_runs_in(storage, client)
            left.pop(0)

    thread = threading.Thread(target=end, name="end-mlflow-runs", daemon=True)
    thread.start()
    thread.join(MLFLOW_SECONDS)
    if unseen := left.copy():  # The thread continues.
        where = join_names(unseen[:1], len(unseen))
        _print_unseen(where, f"no answer within {MLFLOW_SECONDS:.0f} s")


def _print_unseen(where: str, reason: str) -> None:
    print(f"MLflow runs of ended flow runs are not looked for in {where}: {reason}", flush=True)


def _end_mlflow_runs_in(storage: Storage, client: SyncPrefectClient) -> None:
    def status(flow_run: str) -> EndStatus | None:
        try:
            state = client.read_flow_run(UUID(flow_run)).state
        except ObjectNotFound:
            return None  # of another server
        if state is None or not state.is_final():
            return None
        return "KILLED" if state.is_cancelled() else "FAILED"

    try:
        ended = runs.end_lost_runs(storage, status)
    except Exception as error:  # Of any driver of a database, for a URI that a user gave a run: flows can run without.
        _print_unseen(storage.tracking_shown, loggable(error))
        return
    for run in ended:
        print(f"the MLflow run {run} is still running, but its flow run has ended: marked as ended", flush=True)
