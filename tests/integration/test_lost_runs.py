"""Runs whose process is gone: the automation on a real server, and the worker that starts after them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import mlflow
import pytest

from deployments.stack.processes import LocalStack
from tasks.config.storage import StorageConfig
from tasks.storage import resolve_storage
from tasks.tracking.runs import FLOW_RUN_TAG
from tasks.tracking.server import prepare_tracking
from tests.builders.homes import home_with_tracking
from tests.builders.prefect_databases import home_with_databases
from tests.builders.submissions import client_of, end_worker, kill_server, restart_server, run_code, running_server

SILENCE = 20
"""Seconds without a heartbeat; Prefect refuses less than 10."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Iterator[LocalStack]:
    """Return a server with pools and the waiting deployment, without workers."""
    with running_server(home_with_databases(tmp_path_factory, empty_tracking)) as running:
        yield running


def state_of(stack: LocalStack, run: str) -> tuple[str, str | None]:
    """Return type and message of the state of a run."""
    with client_of(stack) as client:
        state = client.read_flow_run(UUID(run)).state
    assert state is not None
    return state.type.value, state.message


def test_worker_ends_the_runs_and_mlflow_runs_that_its_predecessor_left(
    stack: LocalStack, empty_tracking: Path
) -> None:
    """Also in the storage that a run was given, after storages that cannot be used.

    Runs with a process here, or on another machine, stay as they are. One whose process ended before it named its
    machine is that of its worker.
    """
    given = home_with_tracking(stack.home / "given", empty_tracking)
    make = f"""
import socket
from deployments.stack.reconcile import WORKER_LABEL
from prefect.client.orchestration import get_client
from prefect.states import Cancelling, Failed, Pending, Running
from tasks.orchestration.stage import HOST_LABEL

with get_client(sync_client=True) as client:
    deployment = client.read_deployment_by_name("waiting/waiting")
    for states, host, storage in (
        ([Running()], socket.gethostname(), None),
        ([Running(), Cancelling()], socket.gethostname(), None),
        ([Pending()], None, None),
        ([Failed()], None, {{"tracking": "mysql://server/database"}}),
        ([Failed()], None, {{"home": "~nobody-of-this-name/home"}}),
        ([Running()], socket.gethostname(), {given.as_config().model_dump()!r}),
        ([Running()], "another-machine", None),
        ([Running()], None, None),
        ([Running()], {{WORKER_LABEL: "gpu-elsewhere"}}, None),
        ([Running()], {{WORKER_LABEL: f"gpu-{{socket.gethostname()}}"}}, None),
        ([Running()], socket.gethostname(), None),
    ):
        parameters = {{"config": {{"storage": storage}}}} if storage else {{}}
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        for state in states:
            client.set_flow_run_state(run.id, state, force=True)
        if host:
            labels = host if isinstance(host, dict) else {{HOST_LABEL: host}}
            client.update_flow_run_labels(run.id, labels)
        print(run.id)
"""
    runs = run_code(stack, make)
    crashed, cancelled, pending, *refused, given_storage, elsewhere, unknown, others, unnamed, alive = runs
    storage = resolve_storage(StorageConfig(home=str(stack.home)))
    experiment = prepare_tracking(storage)
    client = mlflow.MlflowClient(storage.tracking)
    tracked = {
        run: client.create_run(experiment, tags={FLOW_RUN_TAG: run}).info.run_id
        for run in [*runs, "00000000-0000-0000-0000-000000000000"]
    }
    given_experiment = prepare_tracking(given)
    given_client = mlflow.MlflowClient(given.tracking)
    given_run = given_client.create_run(given_experiment, tags={FLOW_RUN_TAG: given_storage}).info.run_id
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=stack.environment | {"PREFECT__FLOW_RUN_ID": alive},
    )
    try:
        stack.start("worker-gpu", [sys.executable, "-m", "deployments.worker", "--pool", "gpu"])
        deadline = time.monotonic() + 120
        log = stack.log_file("worker-gpu")
        while "started!" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    states = {run: state_of(stack, run)[0] for run in runs}
    assert states == {
        crashed: "CRASHED",
        cancelled: "CANCELLED",
        pending: "CRASHED",
        **dict.fromkeys(refused, "FAILED"),
        given_storage: "CRASHED",
        elsewhere: "RUNNING",
        unknown: "RUNNING",
        others: "RUNNING",
        unnamed: "CRASHED",
        alive: "RUNNING",
    }
    statuses = {run: client.get_run(run_id).info.status for run, run_id in tracked.items()}
    assert [statuses[run] for run in runs] == [
        "FAILED",
        "KILLED",
        *["FAILED"] * 4,
        *["RUNNING"] * 3,
        "FAILED",
        "RUNNING",
    ]
    assert list(statuses.values())[-1] == "RUNNING"  # its flow run is on another server
    assert given_client.get_run(given_run).info.status == "FAILED"
    end_worker(stack, dict(stack._processes)["worker-gpu"])


@pytest.mark.fault
def test_silent_run_crashes_but_not_because_the_server_was_away(stack: LocalStack) -> None:
    """After an outage longer than the silence, the automation waits for heartbeats anew; a suspended run sends none."""
    code = f"""
import time
from datetime import timedelta
from deployments.stack.register import HEARTBEAT, crash_silent_runs
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.states import Running, Suspended
with get_client(sync_client=True) as client:
    for _ in range(2):  # the second call finds it
        crash_silent_runs(client, timedelta(seconds={SILENCE}))
    print(len(client.read_automations()))
    runs = [
        client.create_flow_run_from_deployment(client.read_deployment_by_name("waiting/waiting").id) for _ in range(2)
    ]
    for run in runs:
        client.set_flow_run_state(run.id, Running(), force=True)
        emit_event(HEARTBEAT, {{"prefect.resource.id": f"prefect.flow-run.{{run.id}}"}})
        print(run.id)
    time.sleep(5)  # the heartbeat comes first
    client.set_flow_run_state(runs[1].id, Suspended(), force=True)
"""
    num_automations, run, suspended = run_code(stack, code)
    assert num_automations == "1"
    time.sleep(5)  # the event is on its way to the automation
    kill_server(stack)
    time.sleep(SILENCE + 5)
    began = time.monotonic()
    restart_server(stack)
    while time.monotonic() - began < SILENCE - 5:
        assert state_of(stack, run)[0] == "RUNNING"
        time.sleep(0.5)
    deadline = time.monotonic() + 120
    while (found := state_of(stack, run))[0] == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert state_of(stack, suspended)[0] == "PAUSED"
    assert found == ("CRASHED", f"It has sent no heartbeat for {SILENCE} s: its process, worker or machine is gone.")
