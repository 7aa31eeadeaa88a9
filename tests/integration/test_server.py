"""A real Prefect server: the path to the GPU pool, with and without a worker, and how it all ends."""

import ast
import subprocess
import sys
import time
from datetime import UTC, datetime

import httpx
import psutil
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from deployments.local_stack import prefect_command
from deployments.login import OWN_STRING, authorization
from deployments.ports import listen
from deployments.stack_mark import STACK_MARK
from deployments.stack_processes import LocalStack
from tasks.config.pipeline import PipelineConfig
from tests.builders.chromium import WAIT_SECONDS, chromium, find_field, log_in, text_of
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.processes import free_port, rank_processes, run_python, server_errors


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Run a server with the pools and deployments of a fresh stack, no worker, and a user's own login."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(OWN_STRING, "somebody:own login")
        # Slots of this machine that others have, on which the numbers of ours would depend.
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("slots")))
        running = LocalStack(tmp_path_factory.mktemp("stack") / "home", free_port())
        running.start_server()
        try:
            running.run("register", [sys.executable, "-m", "deployments.register"])
            yield running
        finally:
            running.end()
    assert server_errors(running.home) == []


def marked(stack: LocalStack) -> list[int]:
    """Return the processes that carry the stack's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(STACK_MARK) == stack.mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def submit(stack: LocalStack, code: str) -> subprocess.CompletedProcess:
    """Run Python in a process of its own, against the stack's server."""
    return run_python("-c", code, environment=stack.environment, timeout=400)


def test_a_pool_without_a_worker_is_said_and_refused_in_time(stack):
    """With the command that starts one; what was submitted is cancelled."""
    code = """
from prefect import flow
from tasks.config import *
from tasks.launch.task import submit_train_distributed
from tasks.pool.task import live_workers
from tasks.refs import CacheRef
from tasks.storage import resolve_storage

@flow
def only_submit():
    assert live_workers("gpu", "distributed") == 0
    distributed = DistributedConfig(submit_timeout_seconds=25)
    submit_train_distributed(TrainConfig(weights="none", freeze_backbone=False), distributed,
                             CacheRef(url="/nowhere", digest="none"), resolve_storage(StorageConfig()))
only_submit()
"""
    done = submit(stack, code)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "no worker polls the work pool 'gpu': start one with 'prefect worker start --pool gpu'" in said
    assert "no worker of the work pool 'gpu' took the training within distributed.submit_timeout_seconds 25" in said
    left = submit(
        stack,
        """
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print([run.state.type.value for run in client.read_flow_runs() if run.deployment_id])
""",
    )
    assert left.stdout.strip() in {"['CANCELLED']", "['CANCELLING']"}


def test_an_unknown_pool_is_refused_with_the_command_that_makes_it(stack):
    """Before anything is submitted."""
    code = "from tasks.pool.task import live_workers; live_workers('tpu', 'distributed')"
    done = submit(stack, code)
    assert "distributed.work_pool is 'tpu', which the Prefect server does not have" in done.stderr
    assert "prefect work-pool create tpu --type process" in done.stderr


def test_a_pool_that_the_deployment_does_not_run_on_is_refused(stack):
    """Runs go to the deployment's own pool, and nobody would ever see them on another; nothing is submitted."""
    code = """
from prefect.client.orchestration import get_client
from tasks.config import DistributedConfig, TuneConfig
from tasks.errors import WrongInput
from tasks.pool.task import check_pool, submit

with get_client(sync_client=True) as client:
    flow_id = client.read_deployment_by_name("train-trial/train-trial").flow_id
    served = client.create_deployment(flow_id=flow_id, name="served")  # as `Flow.serve` does, without a pool
    before = len(client.read_flow_runs())
    for group, settings in {
        "distributed": DistributedConfig(work_pool="cpu"),
        "tune": TuneConfig(deployment="train-trial/served"),
    }.items():
        for act in (lambda: check_pool(settings, group, "it"), lambda: submit(settings, group, "it", {})):
            try:
                act()
            except WrongInput as error:
                print(error)
    print(len(client.read_flow_runs()) - before)
    client.delete_deployment(served)
"""
    routed = (
        "distributed.work_pool is 'cpu', but the runs of distributed.deployment 'train-distributed/train-distributed' "
        "go to the pool 'gpu': give that name, or a deployment whose work_pool in deployments/prefect.yaml is 'cpu'"
    )
    nowhere = (
        "tune.work_pool is 'gpu', but the runs of tune.deployment 'train-trial/served' "
        "go to no pool: give a deployment whose work_pool in deployments/prefect.yaml is 'gpu'"
    )
    done = submit(stack, code)
    assert done.stdout.splitlines() == [routed, routed, nowhere, nowhere, "0"], done.stderr


def test_trials_of_a_search_run_on_the_gpu_pool(stack, make_images):
    """Two at once, where a person lets the pool have two, each in a slot; the best one is not trained again."""
    widen = """
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
with get_client(sync_client=True) as client:
    print(client.read_work_pool("gpu").concurrency_limit)
    client.update_work_pool("gpu", WorkPoolUpdate(concurrency_limit=2))
"""
    assert submit(stack, widen).stdout.strip() == "1"
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "by-hand"))
    code = f"""
from prefect import flow
from tasks import tracking
from tasks.config import *
from tasks.orchestration.task import run_stage
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.launch.single_task import train_single
from tasks.tune.task import search_best, submit_best

@flow
def only_search():
    storage, cache = resolve_storage(StorageConfig()), CacheRef(url="{cache.url}", digest="{cache.digest}")
    train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=1)
    search = {{"learning_rate": Choices(choices=[0.001, 0.002])}}
    tune = TuneConfig(search=search, num_trials=2, parallel=2, submit_timeout_seconds=100)
    best = run_stage(search_best, train, tune, cache, storage)
    submitted = run_stage(submit_best, best, tune, cache, storage)
    run = run_stage(train_single, best, cache, storage)
    print("best", best.learning_rate in (0.001, 0.002), submitted, len(tracking.promotable_runs(storage)))

only_search()
"""
    stack.start("worker-gpu", prefect_command("worker", "start", "--pool", "gpu", "--type", "process"))
    worker = dict(stack._processes)["worker-gpu"]
    try:
        done = submit(stack, code)
    finally:
        worker.terminate()
        worker.wait(timeout=60)
    assert done.stdout.splitlines()[-1].split(" ", 2)[:2] == ["best", "True"], done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] in {"best True False 1", "best True False 2"}
    read = """
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter
with get_client(sync_client=True) as client:
    runs = [run for run in client.read_flow_runs() if run.name.startswith("trial-")]
    print(sorted((run.name.split("-")[1], run.work_pool_name, run.state.type.value) for run in runs))
    logs = client.read_logs(LogFilter(flow_run_id={"any_": [run.id for run in runs]}))
    print(sorted(log.message.split(" slot ")[1].split(" on ")[0] for log in logs if " has slot " in log.message))
"""
    runs, slots = submit(stack, read).stdout.splitlines()
    assert runs == "[('0', 'gpu', 'COMPLETED'), ('1', 'gpu', 'COMPLETED')]"
    # One that began when the other had ended took the same.
    assert slots in {"['1 of 2', '2 of 2']", "['1 of 2', '1 of 2']"}


def test_a_trial_that_a_person_cancels_is_given_up_and_a_cancelled_search_ends_all_of_its_own(stack, make_images):
    """The search goes on with the next trial; what was cancelled is not done again, what the search took with it is."""
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "of-cancelled"))
    code = f"""
import sys, threading, time
import mlflow
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Cancelling
from tasks.config import *
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.tune.space import study_name
from tasks.tune.study import open_study, trial_rows
from tasks.tune.task import search_best

storage, cache = resolve_storage(StorageConfig()), CacheRef(url="{cache.url}", digest="{cache.digest}")
train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=9000,
                    patience=1000, seed=5)
tune = TuneConfig(search={{"learning_rate": Choices(choices=[1e-7, 2e-7])}}, num_trials=2, min_epochs=9000,
                  submit_timeout_seconds=100)
mlflow_client = mlflow.MlflowClient(tracking_uri=storage.tracking)

def cancel_when_it_trains(number, client, also):
    while True:
        runs = mlflow_client.search_runs(
            [experiment.experiment_id for experiment in mlflow_client.search_experiments()],
            f"tags.`lakevision.trial` = '{{number}}' AND attributes.status = 'RUNNING' AND metrics.val_loss > 0",
        )
        if runs:
            break
        time.sleep(0.2)
    for run in client.read_flow_runs():
        if str(run.id) in (runs[0].data.tags["prefect.flow_run_id"], also):
            client.set_flow_run_state(run.id, Cancelling())

def cancel(own):
    with get_client(sync_client=True) as client:
        cancel_when_it_trains(0, client, None)
        cancel_when_it_trains(1, client, own)

@flow
def only_search():
    threading.Thread(target=cancel, args=[flow_run.get_id()], daemon=True).start()
    search_best(train, tune, cache, storage)

try:
    only_search()
except Exception as error:
    print("ended with", error)
study = open_study(storage, study_name(train, tune, cache), train, tune, create=False)
print([row["state"] for row in trial_rows(study)], study.user_attrs)
deadline = time.monotonic() + 60
with get_client(sync_client=True) as client:
    while time.monotonic() < deadline:
        runs = [run for run in client.read_flow_runs() if run.name.endswith(study.study_name)]
        if all(run.state.is_final() for run in runs):
            break
        time.sleep(0.5)
    print([run.state.type.value for run in runs])
runs = mlflow_client.search_runs(
    [experiment.experiment_id for experiment in mlflow_client.search_experiments()],
    "tags.`lakevision.trial` = '0'", order_by=["attributes.start_time DESC"])
print(runs[0].info.status)
"""
    stack.start("worker-gpu", prefect_command("worker", "start", "--pool", "gpu", "--type", "process"))
    worker = dict(stack._processes)["worker-gpu"]
    try:
        done = submit(stack, code)
    finally:
        worker.terminate()
        worker.wait(timeout=60)
    ended, states, flow_states, status = done.stdout.splitlines()[-4:]
    assert "'trial-1-" in ended, done.stdout + done.stderr
    assert ended.endswith("was cancelled: run again to train")
    assert states == "['cancelled', 'fail'] {'lakevision.cancelled': [0]}"
    assert flow_states == "['CANCELLED', 'CANCELLED']"
    assert status == "KILLED"


@pytest.fixture(scope="module")
def api(stack):
    """Return a client of the stack's server, which is logged in and has a CSRF token."""
    with httpx.Client(base_url=f"{stack.url}/api", headers=authorization(stack.auth_string), timeout=120) as client:
        token = client.get("/csrf-token", params={"client": "test"}).raise_for_status().json()["token"]
        client.headers.update({"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"})
        yield client


def read_deployment(api: httpx.Client, name: str) -> dict:
    """Return a deployment of the stack's server."""
    return api.get(f"/deployments/name/{name}").raise_for_status().json()


@pytest.mark.parametrize("interface", ["", "/v2"], ids=["first", "second"])
def test_the_form_shows_first_what_most_users_change(stack, api, interface):
    """Source, model, weights and image size are on one screen, the groups are folded, and nothing is a None."""
    with chromium() as browser:
        wait = WebDriverWait(browser, WAIT_SECONDS)
        browser.get(f"{stack.url}/login")
        log_in(browser, stack.auth_string)
        wait.until(lambda page: not page.current_url.endswith("/login"))
        for name in ("pipeline/pipeline", "pipeline/photos"):
            browser.get(f"{stack.url}{interface}/deployments/deployment/{read_deployment(api, name)['id']}/run")
            find_field(browser, "Image Size")
            for label in ("Source", "Model", "Weights", "Image Size"):
                shown = find_field(browser, label).rect
                assert 0 < shown["y"] < shown["y"] + shown["height"] <= 900, (name, label, shown)
            text = text_of(browser)
            assert 'Property is type "None"' not in text
            assert "(16 to 1024)" in text
            # A field of a group, and the group itself.
            assert "Stored Side" not in text
            assert "From a folder of images to the Delta tables" in text
        # The form of photos lacks one thing, which it says when it is submitted.
        submit = [button for button in browser.find_elements(By.TAG_NAME, "button") if button.text.strip() == "Submit"]
        submit[0].click()
        refused = "'source (your folder of class folders, or builtin:digits)' is a required property"
        wait.until(lambda page: refused in text_of(page))
        # The digits' tables take no other source: photos have tables of their own, which a user sees.
        assert find_field(browser, "Tables").get_attribute("value") == "photos-tables"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"source": ""},
            {"source": "'source (your folder of class folders, or builtin:digits)' is a required property"},
        ),
        ({"image_size": 224}, {"source": "'source (your folder of class folders, or builtin:digits)' is a required"}),
        (
            {"source": "/a", "image_size": 5, "train": {"max_epochs": 0}},
            {"image_size": "5 is less than the minimum of 16", "train.max_epochs": "0 is less than the minimum of 1"},
        ),
        ({"source": "/a", "weights": "none"}, {"freeze_backbone": "'freeze_backbone' is a required property"}),
        ({"source": "/a", "weights": "none", "freeze_backbone": True}, {"freeze_backbone": "False was expected"}),
        (
            {"source": "/a", "freeze_backbone": False, "train": {"fine_tune": [{"unfreeze_from": "all"}]}},
            {"train.fine_tune": "is expected to be empty"},
        ),
        (
            {"source": "/a", "train": {"schedule": "one_cycle", "warmup_epochs": 2}},
            {"train.warmup_epochs": "2 is not one of [0, None]"},
        ),
        ({"source": "/a", "etl": {"labels": {"by": "file"}}}, {"etl.labels.file": "'file' is a required property"}),
        (
            {"source": "/a", "etl": {"labels": {"by": "folder", "pattern": "(x)"}}},
            {"etl.labels.by": "'pattern' was expected"},
        ),
        ({"source": "/a", "etl": {"split_by": "file"}}, {"etl.labels": "'labels' is a required property"}),
        (
            {"source": "/a", "etl": {"split_by": "file", "labels": {"by": "folder"}}},
            {"etl.labels.by": "'file' was expected"},
        ),
        ({"source": "/a", "predict": {"alias": "best"}}, {"predict.alias": "'champion' was expected"}),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_is_submitted(api, config, said):
    """The form names every wrong field at once; the server creates no run of it, whoever asks."""
    photos = read_deployment(api, "pipeline/photos")
    values = {"schema": photos["parameter_openapi_schema"], "values": {"config": config}}
    form = api.post("/ui/schemas/validate", json=values).json()

    def flat(errors: list, place: str = "") -> dict[str, str]:
        found = {}
        for error in errors:
            if isinstance(error, str):
                found[place] = error
            else:
                found |= flat(error["errors"], ".".join(filter(None, (place, error["property"]))))
        return found

    errors = flat(form["errors"])
    assert errors.keys() == {f"config.{name}" for name in said}
    assert all(text in errors[f"config.{name}"] for name, text in said.items())
    answer = api.post(f"/deployments/{photos['id']}/create_flow_run", json={"parameters": {"config": config}})
    assert answer.status_code == 409
    assert any(text in answer.json()["detail"] for text in said.values())


@pytest.mark.parametrize(
    "config",
    [
        {"source": "/a", "weights": "none", "freeze_backbone": False, "model_name": "mine"},
        {"etl": {"source": "/a"}, "train": {"weights": "none", "freeze_backbone": False}},  # by group
        {"source": "/a", "weights": "none", "train": {"freeze_backbone": False}},
        {"source": "/a", "storage": {"home": None}, "train": {"max_seconds": None}, "cache": {"keep_days": 0}},
        {"source": "/a", "etl": {"labels": {"by": "file", "file": "s3a://b/labels.CSV"}, "split_by": "file"}},
        {"source": "/a", "etl": {"labels": {"by": "folder", "pattern": None, "file": ""}}},
        {"source": "/a", "train": {"schedule": "one_cycle", "warmup_epochs": 0.0, "fine_tune": []}},
    ],
)
def test_a_run_that_can_be_is_taken(api, config):
    """By the server, and as well by the models that the flow makes of it."""
    PipelineConfig.model_validate(config)
    photos = read_deployment(api, "pipeline/photos")
    answer = api.post(f"/deployments/{photos['id']}/create_flow_run", json={"parameters": {"config": config}})
    assert answer.status_code == 201, answer.text
    api.delete(f"/flow_runs/{answer.json()['id']}").raise_for_status()


def test_a_refused_and_a_cancelled_run_say_so_on_their_pages(stack, make_images):
    """The sentence is the state's message and an artifact, the parent's has the child's; a cancel is no crash.

    No log has a traceback, and nothing of what was cancelled is left running.
    """
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "of-ended"))
    code = f"""
import os, time
from flows.decorator import dag_flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter
from prefect.states import Cancelling
from tasks.config import *
from tasks.launch.task import submit_train_distributed
from tasks.errors import WrongInput
from tasks.orchestration.task import run_stage
from tasks.refs import CacheRef
from tasks.storage import resolve_storage

cache = CacheRef(url="{cache.url}", digest="{cache.digest}")

@dag_flow("only-submit")
def only_submit(config: TrainDistributedRun):
    run_stage(submit_train_distributed, config.train, config.distributed, cache, resolve_storage(config.storage))

def logs(client, run_id, word):
    while True:
        found = client.read_logs(LogFilter.model_validate({{"flow_run_id": {{"any_": [run_id]}}}}))
        if any(word in record.message for record in found):
            return found
        time.sleep(0.2)

def explanation(client, run_id):
    wanted = {{"flow_run_id": {{"any_": [run_id]}}, "key": {{"any_": ["what-went-wrong"]}}}}
    return client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))[0].data

train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=9000,
                    patience=1000, seed=6)
distributed = DistributedConfig(num_ranks=2, submit_timeout_seconds=100, log_ranks="all")
wrong = train.model_copy(update={{"model": "resnet19"}})
state = only_submit(TrainDistributedRun(train=wrong, distributed=distributed), return_state=True)
try:
    state.result()
except WrongInput:
    print("raised as WrongInput")
with get_client(sync_client=True) as client:
    parent = client.read_flow_run(state.state_details.flow_run_id)
    of_parent = FlowRunFilter.model_validate({{"parent_flow_run_id": {{"any_": [parent.id]}}}})
    (child,) = client.read_flow_runs(flow_run_filter=of_parent)
    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({{"id": {{"any_": [child.id]}}}}))
    print({{parent.state.message, child.state.message, *(run.state.message for run in tasks)}})
    link = f"/runs/flow-run/{{child.id}})"
    print("train.model" in explanation(client, child.id), link in explanation(client, parent.id))
    lines = [record.message for run in (parent, child) for record in logs(client, run.id, "Finished in")]
    print(any("Traceback" in line for line in lines))

    deployment = client.read_deployment_by_name("train-distributed/train-distributed")
    config = TrainDistributedRun(train=train, distributed=distributed).model_dump()
    run = client.create_flow_run_from_deployment(
        deployment.id, parameters={{"config": config, "cache_ref": cache.model_dump()}}
    )
    lines = [record.message.partition(": epoch")[0] for record in logs(client, run.id, "rank 1: epoch")]
    print({{"rank 0", "rank 1"}} <= set(lines))
    client.set_flow_run_state(run.id, Cancelling())
    while not (run := client.read_flow_run(run.id)).state.is_final():
        time.sleep(0.2)
    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({{"id": {{"any_": [run.id]}}}}))
    print(run.state.name, run.state.message, sorted((task.name.rpartition("-")[0], task.state.name) for task in tasks))
    print([record.message for record in logs(client, run.id, "Finished in state Cancelled") if record.level >= 40])
"""
    stack.start("worker-gpu", prefect_command("worker", "start", "--pool", "gpu", "--type", "process"))
    worker = dict(stack._processes)["worker-gpu"]
    log = stack.home / "logs" / "worker-gpu.log"
    before = log.stat().st_size
    try:
        done = submit(stack, code)
        left = rank_processes(str(stack.home))
    finally:
        worker.terminate()
        worker.wait(timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    raised, messages, explained, traceback, all_ranks, cancelled, errors = done.stdout.splitlines()[-7:]
    assert raised == "raised as WrongInput"
    (message,) = ast.literal_eval(messages)
    assert message.startswith("train.model is 'resnet19', which is no torchvision classifier")
    assert explained == "True True"
    assert traceback == "False"
    assert all_ranks == "True"
    # In the words of the run's own process: its worker says so later, after another import of the flow.
    assert cancelled == (
        "Cancelled The flow run was cancelled. [('check-training', 'Completed'), ('train-ranks', 'Cancelled')]"
    )
    assert errors == "[]"
    assert left == []
    assert b"Traceback" not in log.read_bytes()[before:]


def test_what_a_person_edited_stays(stack):
    """To deploy again, as every start of a stack does, makes all as the file has it, and schedules paused."""
    switch = """
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.schedules import CronSchedule
with get_client(sync_client=True) as client:
    pipeline = client.read_deployment_by_name("pipeline/pipeline")
    later = CronSchedule(cron="0 5 * * *", timezone="UTC")
    client.update_deployment_schedule(pipeline.id, pipeline.schedules[0].id, active=True, schedule=later)
    client.update_deployment(pipeline.id, DeploymentUpdate(parameters={"config": {"etl": {"source": "/data/mine"}}}))
    client.update_work_pool("gpu", WorkPoolUpdate(concurrency_limit=3))
"""
    assert submit(stack, switch).returncode == 0
    read = """
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    names = ("pipeline/pipeline", "predict-batch/predict-batch")
    deployments = [client.read_deployment_by_name(name) for name in names]
    print([deployment.schedules[0].active for deployment in deployments])
    crons = [deployment.schedules[0].schedule.cron for deployment in deployments]
    print(crons, deployments[0].parameters)
    print(client.read_work_pool("gpu").concurrency_limit)
"""
    kept = "['0 5 * * *', '0 * * * *'] {'config': {'etl': {'source': '/data/mine'}}}"
    for _ in range(2):  # an edit stays one, however often a stack starts
        stack.run("register", [sys.executable, "-m", "deployments.register"])
        assert submit(stack, read).stdout.split("\n")[:3] == ["[True, False]", kept, "3"]


def test_runs_that_an_ended_stack_left_are_ended_and_those_of_this_one_are_not(stack):
    """They would hold the pool's only slot, or be run with old parameters; a cancelled one did not crash."""
    make = """
from prefect.client.orchestration import get_client
from prefect.states import Cancelling, Running
with get_client(sync_client=True) as client:
    deployment = client.read_deployment_by_name("train-distributed/train-distributed")
    for states in ([Running()], [Running(), Cancelling()]):
        run = client.create_flow_run_from_deployment(deployment.id)
        for state in states:
            client.set_flow_run_state(run.id, state, force=True)
        print(run.id)
"""
    before = submit(stack, make).stdout.split()
    began = datetime.now(UTC).isoformat()
    after = submit(stack, make).stdout.split()
    stack.run("register", [sys.executable, "-m", "deployments.register", began])
    read = f"""
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print([client.read_flow_run(run).state.type.value for run in {before + after}])
"""
    assert submit(stack, read).stdout.strip() == "['CRASHED', 'CANCELLED', 'RUNNING', 'CANCELLING']"


def test_nothing_of_a_stack_is_left_when_it_ended(stack):  # the last one that uses it
    """Whatever led a session of its own is found by its mark."""
    stack.start("worker-cpu", prefect_command("worker", "start", "--pool", "cpu", "--type", "process"))
    stray = subprocess.Popen(["sleep", "600"], env=stack.environment, start_new_session=True)
    # Its environment can be read from when the kernel has set its memory up, a moment after it was started.
    deadline = time.monotonic() + 10
    while stray.pid not in marked(stack):
        assert time.monotonic() < deadline, "what was started just now carries no mark"
        time.sleep(0.05)
    stack.end()
    stray.wait(timeout=10)
    assert marked(stack) == []
    listen(stack.port, "the Prefect server", "set LAKEVISION_PORT").close()
