"""Distributed training as Prefect tasks: submit it to the GPU pool, or run its ranks right here."""

import time
from typing import Any, Literal

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import TaskRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from tasks import tracking
from tasks.config import DistributedConfig, TrainConfig, TrainDistributedRun
from tasks.distributed.rank import RankSpec
from tasks.errors import WrongInput
from tasks.orchestration.task import flow_run_tags, skipped, stage
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.train.run import run_key
from tasks.train.task import existing_run_key, publish_run, train_with_artifacts

POLL_SECONDS = 2.0
SAY_AFTER_SECONDS = 20.0
"""A submitted run without a worker is reported after this long, well within a minute."""


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    return existing_run_key(parameters["train"], parameters["cache"], parameters["storage"], parameters["distributed"])


def where_to_train(distributed: DistributedConfig) -> Literal["work_pool", "in_place"]:
    """Return where the ranks run: a temporary server, as a plain Python call starts it, has no workers."""
    if distributed.where != "auto":
        return distributed.where
    return "work_pool" if PREFECT_API_URL.value() else "in_place"


def worker_command(pool: str) -> str:
    """Return the command that starts a worker."""
    return f"prefect worker start --pool {pool}"


def live_workers(pool: str) -> int:
    """Return how many workers poll the pool.

    Raises:
        WrongInput: There is no such pool.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(pool)
        except ObjectNotFound:
            raise WrongInput(
                f"distributed.work_pool is '{pool}', which the Prefect server does not have: "
                f"create it with 'prefect work-pool create {pool} --type process', or set distributed.where to in_place"
            ) from None
        response = client.request(
            "POST",
            "/work_pools/{work_pool_name}/workers/filter",
            path_params={"work_pool_name": found.name},
            json={"limit": 200},
        )
        return sum(worker["status"] == "ONLINE" for worker in response.json())


def check_deployment(distributed: DistributedConfig) -> None:
    """Refuse a deployment that the server does not have.

    Raises:
        WrongInput: Names it, and the command that deploys.
    """
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(distributed.deployment)
        except ObjectNotFound:
            raise WrongInput(
                f"distributed.deployment is '{distributed.deployment}', which the Prefect server does not have: "
                "run 'prefect deploy --all --prefect-file deployments/prefect.yaml', "
                "or set distributed.where to in_place"
            ) from None


def _cancel(run: FlowRun) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())


def _wait(run: FlowRun, distributed: DistributedConfig) -> FlowRun:
    """Wait until the submitted run ends; say early when no worker takes it, and give up after the timeouts.

    Raises:
        WrongInput: No worker took it within `submit_timeout_seconds`.
        TimeoutError: It took longer than `run_timeout_seconds`.
    """
    log = get_run_logger()
    waiting_since = time.monotonic()
    said_no_worker = said_busy = False
    started: float | None = None
    with get_client(sync_client=True) as client:
        while True:
            run = client.read_flow_run(run.id)
            state = run.state
            assert state is not None
            if state.is_final():
                return run
            if started is None and (state.is_scheduled() or state.is_pending()):
                waited = time.monotonic() - waiting_since
                if waited > SAY_AFTER_SECONDS and live_workers(distributed.work_pool):
                    # The pool is busy, and its turn will come: only a pool without a worker is given up.
                    waiting_since = time.monotonic()
                    if not said_busy and state.is_scheduled():  # a pending one is starting already
                        said_busy = True
                        log.info("the work pool '%s' is busy: waiting for a slot", distributed.work_pool)
                elif waited > distributed.submit_timeout_seconds:
                    raise WrongInput(
                        f"no worker of the work pool '{distributed.work_pool}' took the training within "
                        f"distributed.submit_timeout_seconds {distributed.submit_timeout_seconds}: "
                        f"start one with '{worker_command(distributed.work_pool)}' and run again"
                    )
                elif waited > SAY_AFTER_SECONDS and not said_no_worker:
                    said_no_worker = True
                    log.warning(
                        "no worker polls the work pool '%s': start one with '%s'; waiting %d s more",
                        distributed.work_pool,
                        worker_command(distributed.work_pool),
                        distributed.submit_timeout_seconds - waited,
                    )
            else:
                started = started or time.monotonic()
                if time.monotonic() - started > distributed.run_timeout_seconds:
                    raise TimeoutError(
                        f"the submitted training took longer than distributed.run_timeout_seconds "
                        f"{distributed.run_timeout_seconds}: it was cancelled"
                    )
            time.sleep(POLL_SECONDS)


@stage("train-distributed", timeout_seconds=None, cache_key=_key)
def submit_train_distributed(
    train: TrainConfig, distributed: DistributedConfig, cache: CacheRef, storage: Storage
) -> RunRef:
    """Submit the distributed training to the work pool and wait for it; without a server, train in place."""
    key = run_key(train, cache, distributed)
    if found := tracking.find_finished_run(storage, key):
        publish_run(found, storage, "train-distributed")
        return skipped(found, f"MLflow run {found.run_id} has trained this already")
    if where_to_train(distributed) == "in_place":
        get_run_logger().info("no Prefect server is configured: %d ranks train in place", distributed.num_ranks)
        spec = RankSpec(train=train, distributed=distributed, cache=cache, storage=storage, tags=flow_run_tags())
        return train_with_artifacts(spec, "train-distributed")
    parameters = {
        "config": TrainDistributedRun(storage=storage.as_config(), train=train, distributed=distributed).model_dump(),
        "cache_ref": cache.model_dump(),
    }
    run = run_deployment(
        distributed.deployment,
        parameters=parameters,
        timeout=0,
        # A task that lost its connection and runs again finds the run it submitted; after a failed one it submits anew.
        idempotency_key=f"{task_run.get_id()}-{task_run.get_run_count()}",
    )
    assert isinstance(run, FlowRun), "called without an event loop, run_deployment returns the run"
    try:
        run = _wait(run, distributed)
    except BaseException:
        # Cancelled, timed out or failed: what was submitted ends with us.
        try:
            _cancel(run)
        except Exception as error:  # The first error is the one to report.
            get_run_logger().warning("the submitted training '%s' could not be cancelled: %s", run.name, error)
        raise
    # A failed child does not fail its parent by itself.
    assert run.state is not None
    message = run.state.message or ""
    if "WrongInput: " in message:
        raise WrongInput(message.split("WrongInput: ", 1)[1])
    if run.state.is_cancelled() or run.state.is_cancelling():
        raise WrongInput(f"the submitted training '{run.name}' was cancelled: run again to train")
    if not run.state.is_completed():
        raise RuntimeError(f"the submitted training '{run.name}' ended as {run.state.name}: {run.state.message}")
    finished = tracking.find_finished_run(storage, key)
    if finished is None:
        raise RuntimeError(
            f"the submitted training '{run.name}' completed, but '{storage.tracking_shown}' has no finished run {key}: "
            "the worker must use the same storage.tracking"
        )
    return finished


@stage("train-ranks", timeout_seconds=None)
def train_ranks(train: TrainConfig, distributed: DistributedConfig, cache: CacheRef, storage: Storage) -> RunRef:
    """Run the ranks on this machine: what the worker of the GPU pool does."""
    spec = RankSpec(train=train, distributed=distributed, cache=cache, storage=storage, tags=flow_run_tags())
    return train_with_artifacts(spec, "train-distributed")
