"""Runs that are submitted to a work pool, while server, worker and machine fail."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deployments.stack.processes import LocalStack
from tests.builders.prefect_databases import copy_prefect_database
from tests.builders.processes import run_python
from tests.builders.submissions import (
    WAIT_SECONDS,
    client_of,
    end_worker,
    kill_server,
    prefect_command,
    process_of,
    restart_server,
    run_code,
    running_server,
    start_submitter,
    start_worker,
    states,
    submitted_name,
    wait_until,
)

LIMIT_SECONDS = 15
"""Time after the end of a worker within which its runs must have ended."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Return a server with pools and the waiting deployment, without workers."""
    home = tmp_path_factory.mktemp("submission") / "home"
    copy_prefect_database(home, tmp_path_factory)
    with running_server(home) as running:
        yield running


def test_outage_of_the_server_is_waited_out(stack: LocalStack, tmp_path: Path) -> None:
    """The submitted run completes, and was submitted once; the outage has one warning, and a line at its end."""
    worker = start_worker(stack)
    submitter = start_submitter(stack, tmp_path / "outage", 3600, client_retries=0)
    process_of(tmp_path / "outage")
    kill_server(stack)
    time.sleep(10)
    restart_server(stack)
    (tmp_path / "outage" / "end").touch()
    printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
    end_worker(stack, worker)
    assert submitter.returncode == 0, printed
    # A warning of Prefect about late events may follow.
    assert [line for line in printed.splitlines() if "| EventsWorker - Still" not in line][-1] == "completed"
    assert printed.count("the Prefect server does not answer") == 1
    assert printed.count("the Prefect server answers again") == 1
    assert "could not be cancelled" not in printed
    assert states(stack) == {submitted_name(printed): "COMPLETED"}


@pytest.mark.fault
def test_cancelled_run_ends_although_its_worker_does_not_see_it(stack: LocalStack, tmp_path: Path) -> None:
    """After an outage, Prefect's worker may look for cancellations late or never; here it is stopped."""
    worker = start_worker(stack)
    submitter = start_submitter(stack, tmp_path / "unseen", 3600)
    process = process_of(tmp_path / "unseen")
    worker.send_signal(signal.SIGSTOP)
    with client_of(stack) as client:
        (run,) = [run for run in client.read_flow_runs() if run.deployment_id and run.state and run.state.is_running()]
    command = prefect_command("flow-run", "cancel", str(run.id))
    subprocess.run(command, env=stack.environment, check=True, capture_output=True, timeout=120)
    began = time.monotonic()
    while process.status() != psutil.STATUS_ZOMBIE:  # its parent, the worker, is stopped
        assert time.monotonic() - began < LIMIT_SECONDS
        time.sleep(0.2)
    printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
    assert states(stack)[submitted_name(printed)] == "CANCELLED"
    worker.send_signal(signal.SIGCONT)
    end_worker(stack, worker)
    assert states(stack)[submitted_name(printed)] == "CANCELLED"


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_run_whose_worker_or_process_is_killed_is_lost_and_frees_its_slot(stack: LocalStack, tmp_path: Path) -> None:
    """It ends with its worker although it writes nothing. Errors say why; the pool's only slot goes to the next run."""
    worker = start_worker(stack, ends_lost_runs=True)
    submitter = start_submitter(stack, tmp_path / "lost", 3600, heartbeat_timeout_seconds=60)
    process = process_of(tmp_path / "lost")
    time.sleep(5)  # the first heartbeat is on its way to the server
    second = run_python("-m", "deployments.worker", "--pool", "gpu", environment=stack.environment, timeout=120)
    assert re.search(rf"^the worker 'gpu-.*' runs here already, as process {worker.pid}: give", second.stderr)
    os.killpg(worker.pid, signal.SIGKILL)
    end_worker(stack, worker)
    process.wait(timeout=LIMIT_SECONDS)
    printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
    name = submitted_name(printed)
    assert submitter.returncode != 0
    assert f"the submitted training '{name}' has sent no heartbeat for " in printed
    assert "its process, worker or machine is gone; run again, training resumes from its checkpoint" in printed
    assert states(stack)[name] == "CRASHED"

    worker = start_worker(stack)
    submitter = start_submitter(stack, tmp_path / "killed", 3600)
    process_of(tmp_path / "killed").kill()
    printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
    name = submitted_name(printed)
    assert submitter.returncode != 0
    assert re.search(rf"the submitted training '{name}' ended as Crashed: .*; run again, training resumes", printed)
    assert states(stack)[name] == "CRASHED"

    following = start_submitter(stack, tmp_path / "next", 1)
    printed, _ = following.communicate(timeout=WAIT_SECONDS)
    end_worker(stack, worker)
    assert following.returncode == 0, printed


@pytest.mark.fault
def test_run_that_is_left_pending_is_lost_although_a_worker_polls(stack: LocalStack, tmp_path: Path) -> None:
    """A run that a dead worker had taken is given up after `start_timeout_seconds`, and frees its slot."""
    submitter = start_submitter(stack, tmp_path / "pending", 1, start_timeout_seconds=5, submit_timeout_seconds=200)
    wait_until(lambda: "SCHEDULED" in states(stack).values())
    take = """
from prefect.client.orchestration import get_client
from prefect.states import Pending
with get_client(sync_client=True) as client:
    for run in client.read_flow_runs():
        if run.deployment_id and run.state.is_scheduled():
            client.set_flow_run_state(run.id, Pending(), force=True)
"""
    run_code(stack, take)
    worker = start_worker(stack)
    printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
    end_worker(stack, worker)
    assert submitter.returncode != 0
    assert "which has not begun within distributed.start_timeout_seconds 5: its worker is gone" in printed
    assert states(stack)[submitted_name(printed)] in {"CRASHED", "CANCELLED"}
    assert not set(states(stack).values()) & {"PENDING", "RUNNING", "CANCELLING"}


def test_submission_is_found_again_and_has_tags_and_job_variables(stack: LocalStack) -> None:
    """A retry takes a run that is alive or has its result, also in another task, and submits another one otherwise."""
    code = """
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.states import Completed, Crashed
from tasks.config.distributed import DistributedConfig
from tasks.errors import WrongInput
from tasks.orchestration.stage import stage
from tasks.orchestration.submission import submit

settings = DistributedConfig(deployment="waiting/waiting", job_variables={"env": {"GPU": "1"}, "stream_output": False})

@stage("submit", retries=0)
def submit_once(seconds, attempt, has_result=True):  # the result of a task is cached by its arguments
    given = {"folder": "/", "seconds": seconds}
    return str(submit(settings, "distributed", "training", given, has_result=lambda: has_result)._id)

@stage("refused", retries=0)
def refused():
    wrong = settings.model_copy(update={"job_variables": {"stream_output": "sometimes"}})
    submit(wrong, "distributed", "training", {"folder": "/", "seconds": 3})

@flow
def submits():
    with get_client(sync_client=True) as client:
        first, again, other = submit_once(1, 1), submit_once(1, 2), submit_once(2, 1)
        print(first == again, first == other)
        run = client.read_flow_run(first)
        print(sorted(run.tags), run.job_variables)
        client.set_flow_run_state(run.id, Crashed(), force=True)
        second = submit_once(1, 3)
        print(second == first)
        client.set_flow_run_state(second, Completed(), force=True)
        third = submit_once(1, 5, has_result=False)
        print(submit_once(1, 4) == second, third in (first, second), submit_once(1, 6) == second)
    try:
        refused()
    except WrongInput as error:
        print(error)

with tags("nightly"):
    submits()
"""
    found, described, resubmitted, completed, refused = run_code(stack, code)
    assert found == "True False"
    assert described == "['nightly', 'of-deployment'] {'env': {'GPU': '1'}, 'stream_output': False}"
    assert resubmitted == "False"
    assert completed == "True False True"
    assert refused.startswith("distributed.job_variables or other settings do not fit distributed.deployment 'waiting")


def test_runs_that_hold_all_slots_and_wait_for_their_pool_are_found(stack: LocalStack) -> None:
    """They are named only while each of them waits for another run of the same pool."""
    code = """
from prefect import task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.states import Cancelled, Running, Scheduled
from tasks.orchestration.pools import blocking_runs, read_pool

@task
def nothing():
    pass

with get_client(sync_client=True) as client:
    for run in client.read_flow_runs():
        if not run.state.is_final():
            client.set_flow_run_state(run.id, Cancelled(), force=True)
    deployment = client.read_deployment_by_name("waiting/waiting")
    parents = [client.create_flow_run_from_deployment(deployment.id, name=name) for name in ("one", "two")]
    for parent in parents:
        client.set_flow_run_state(parent.id, Running(), force=True)
        within = client.create_task_run(nothing, parent.id, "0")
        print(sorted(blocking_runs(client, "gpu")))
        client.create_flow_run_from_deployment(deployment.id, parent_task_run_id=within.id, state=Scheduled())
        print(sorted(blocking_runs(client, "gpu")))
    print(read_pool("gpu", "distributed"))
"""
    *blocking, pool = run_code(stack, code)
    assert blocking == ["[]", "['one']", "[]", "['one', 'two']"]
    assert pool.startswith("(1, ")


def test_run_on_a_pool_with_gpus_gets_one_for_each_rank(stack: LocalStack) -> None:
    """Unless its user has chosen a number, or the pool has none; ranks without a GPU each would train on the CPU."""
    code = """
import json
from pathlib import Path
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from tasks.config.distributed import DistributedConfig
from tasks.orchestration.submission import _job_variables

def variables(num_ranks, **settings):
    print(_job_variables(DistributedConfig(deployment="waiting/waiting", **settings), num_ranks))

with get_client(sync_client=True) as client:
    for kind in ("docker", "kubernetes"):
        template = json.loads(Path("deployments", "pools", f"{kind}.json").read_text())
        client.create_work_pool(WorkPoolCreate(name=kind, type=kind, base_job_template=template))
for pool in ("gpu", "docker", "kubernetes"):
    variables(4, work_pool=pool, job_variables={"memory": "64Gi"})
variables(4, work_pool="kubernetes", job_variables={"gpus": 2})
variables(None, work_pool="kubernetes")
with get_client(sync_client=True) as client:
    id = client.read_deployment_by_name("waiting/waiting").id
    client.update_deployment(id, DeploymentUpdate(job_variables={"gpus": 3}))
    variables(4, work_pool="kubernetes")
    client.update_deployment(id, DeploymentUpdate(job_variables={}))
"""
    memory = {"memory": "64Gi"}
    expected = [memory, memory, memory | {"gpus": 4}, {"gpus": 2}, {}, {}]
    assert run_code(stack, code) == [str(variables) for variables in expected]


def test_work_that_a_run_submits_to_its_own_pool_with_one_slot_is_refused(stack: LocalStack) -> None:
    """The check runs within a flow run of the pool, whose slot is the only one."""
    code = """
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Pending
from tasks.config.distributed import DistributedConfig
from tasks.errors import WrongInput
from tasks.orchestration.pools import check_pool

@flow
def checks():
    check_pool(DistributedConfig(deployment="waiting/waiting"), "distributed", "distributed training")

checks()
with get_client(sync_client=True) as client:
    deployment = client.read_deployment_by_name("waiting/waiting")
    run = client.create_flow_run_from_deployment(deployment.id)
    client.set_flow_run_state(run.id, Pending(), force=True)
    run = client.read_flow_run(run.id)
try:
    run_flow(checks, flow_run=run)
except WrongInput as error:
    print(error)
"""
    assert run_code(stack, code) == [
        "distributed.work_pool is 'gpu', on which this run has the only slot (its concurrency limit is 1), so that "
        "distributed training would never begin: raise the limit of the pool, give another pool, or set "
        "distributed.where to in_place"
    ]
