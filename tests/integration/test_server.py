"""Deployments, work pools, forms and cancellation on a real Prefect server."""

import ast
import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import UUID

import httpx
import psutil
import pytest
from deltalake import DeltaTable
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.filters import ArtifactFilter, LogFilter
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import Cancelled, Cancelling, Failed, Pending, Running
from pydantic import ValidationError
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from deployments.stack.login import OWN_STRING, authorization
from deployments.stack.processes import STACK_MARK, LocalStack
from tasks.config.pipeline import PipelineConfig
from tasks.config.promotion import PromoteConfig
from tasks.errors import invalid_settings
from tasks.predict.shown import answers_markdown
from tasks.predict.thumbnails import SIDE, thumbnail
from tasks.refs import FailedFile, ModelRef, PredictedImage, PredictReport, TableRef
from tasks.registry.promote import promote_best
from tasks.system.listening import free_port, listen
from tests.builders.chromium import WAIT_SECONDS, chromium, find_field, log_in, text_of
from tests.builders.delta_rows import delta_rows
from tests.builders.etl_and_cache import make_storage
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.image_bytes import encoded, noise
from tests.builders.killed_streams import is_in_batch
from tests.builders.prefect_databases import home_with_databases
from tests.builders.processes import rank_processes, run_python, server_errors
from tests.builders.streams import stream
from tests.builders.submissions import client_of, end_worker, worker_command
from tests.builders.untrained_model import log_run


@pytest.fixture(scope="module")
def stack(tmp_path_factory, empty_tracking):
    """Return a stack with a server, pools and deployments, without workers, and with a user's own login."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(OWN_STRING, "user:own login")
        # Slot numbers would depend on those that other stacks of this machine hold.
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("slots")))
        running = LocalStack(home_with_databases(tmp_path_factory, empty_tracking), free_port())
        running.start_server()
        try:
            running.start("register", [sys.executable, "-m", "deployments.stack.register"])
            running.finish("register")
            yield running
        finally:
            running.end()
    assert server_errors(running.home) == []


def marked(stack: LocalStack) -> list[int]:
    """Return the ids of the processes that carry the stack's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(STACK_MARK) == stack.mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def submit(stack: LocalStack, code: str) -> subprocess.CompletedProcess:
    """Run Python code in its own process, against the stack's server."""
    return run_python("-c", code, environment=stack.environment, timeout=400)


@pytest.fixture(scope="module")
def gpu_worker(stack):
    """Run a worker of the pool `gpu`, until a test ends it."""
    stack.start("worker-gpu", worker_command("gpu", "--name", "gpu"))


def end_gpu_worker(stack: LocalStack) -> None:
    """End the worker of the pool `gpu`, if it runs."""
    if worker := dict(stack._processes).get("worker-gpu"):
        end_worker(stack, worker)


def test_pool_without_a_worker_is_reported_and_times_out(stack):
    """The log has the command that starts a worker, and the submitted run is cancelled."""
    code = """
from prefect import flow
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.launch.task import submit_train_distributed
from tasks.orchestration.pools import read_pool
from tasks.refs import CacheRef
from tasks.storage import resolve_storage

@flow
def only_submit():
    assert read_pool("gpu", "distributed")[1] == 0
    distributed = DistributedConfig(submit_timeout_seconds=25)
    submit_train_distributed(TrainConfig(weights="none", freeze_backbone=False), distributed,
                             CacheRef(url="/nowhere", digest="none"), resolve_storage(StorageConfig()))
only_submit()
"""
    done = submit(stack, code)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "no worker polls the work pool 'gpu': start one with 'prefect worker start --pool gpu'" in output
    assert "no worker of the work pool 'gpu' took the training within distributed.submit_timeout_seconds 25" in output
    with client_of(stack) as client:
        left = [run.state.type.value for run in client.read_flow_runs() if run.deployment_id]
    assert left in (["CANCELLED"], ["CANCELLING"])


def test_unknown_pool_is_rejected_with_the_command_that_creates_it(stack):
    """A pool that the server does not have is rejected before a run is submitted."""
    code = "from tasks.orchestration.pools import read_pool; read_pool('tpu', 'distributed')"
    done = submit(stack, code)
    assert "distributed.work_pool is 'tpu', which the Prefect server does not have" in done.stderr
    assert "prefect work-pool create tpu --type process" in done.stderr


def test_pool_that_is_not_the_deployments_own_is_rejected(stack):
    """Runs go to the deployment's own pool, so another pool would never get them; no run is submitted."""
    code = """
from prefect.client.orchestration import get_client
from tasks.config.distributed import DistributedConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput
from tasks.orchestration.pools import check_pool
from tasks.orchestration.submission import submit

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


def test_training_in_one_process_runs_on_the_gpu_pool_where_the_dag_is_told_so(stack, gpu_worker, make_images):
    """The worker of the pool trains, the run has the key of training in place, and a repeated call submits nothing.

    After the MLflow run was deleted, the same flow run trains it again.
    """
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "of-single"))
    code = f"""
import mlflow
from prefect import flow
from prefect.client.orchestration import get_client
from tasks.config.submitted import SingleConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.launch.task import train_single
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.tracking.runs import find_finished_run
from tasks.train.spec import run_key

def num_submitted():
    with get_client(sync_client=True) as client:
        return sum(run.work_pool_name == "gpu" for run in client.read_flow_runs())

@flow
def only_train():
    storage, cache = resolve_storage(StorageConfig()), CacheRef(url="{cache.url}", digest="{cache.digest}")
    train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=1,
                        seed=77)
    single, before = SingleConfig(where="work_pool", submit_timeout_seconds=100), num_submitted()
    runs = [run_stage(train_single, train, cache, storage, single) for _time in range(2)]
    found, once = find_finished_run(storage, run_key(train, cache, None)), num_submitted() - before
    mlflow.MlflowClient(storage.tracking).delete_run(found.run_id)
    again = run_stage(train_single, train, cache, storage, single)
    print("trained", runs == [found, found], once, again != found, num_submitted() - before)

only_train()
"""
    done = submit(stack, code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "trained True 1 True 2"


def test_trials_of_a_search_run_on_the_gpu_pool(stack, gpu_worker, make_images):
    """Two trials run at once in a pool with a limit of two, each in its slot; the best trial is not trained again."""
    with client_of(stack) as client:
        assert client.read_work_pool("gpu").concurrency_limit == 1
        client.update_work_pool("gpu", WorkPoolUpdate(concurrency_limit=2))
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "by-hand"))
    code = f"""
from prefect import flow
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import Choices, TuneConfig
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.launch.task import train_single
from tasks.tracking.trained import promotable_runs
from tasks.tune.task import search_best, submit_best

@flow
def only_search():
    storage, cache = resolve_storage(StorageConfig()), CacheRef(url="{cache.url}", digest="{cache.digest}")
    train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=1)
    search = {{"learning_rate": Choices(choices=[0.001, 0.002])}}
    tune = TuneConfig(search=search, num_trials=2, parallel=2, submit_timeout_seconds=100)
    before = len(promotable_runs(storage))  # of other tests
    best = run_stage(search_best, train, tune, cache, storage)
    submitted = run_stage(submit_best, best, tune, cache, storage)
    run = run_stage(train_single, best, cache, storage)
    added = len(promotable_runs(storage)) - before
    print("best", best.learning_rate in (0.001, 0.002), submitted, added)

only_search()
"""
    done = submit(stack, code)
    assert done.stdout.splitlines()[-1].split(" ", 2)[:2] == ["best", "True"], done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "best True False 1"
    with client_of(stack) as client:
        runs = [run for run in client.read_flow_runs() if run.name.startswith("trial-")]
        logs = client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [run.id for run in runs]}}))
    assert sorted((run.name.split("-")[1], run.work_pool_name, run.state.type.value) for run in runs) == [
        ("0", "gpu", "COMPLETED"),
        ("1", "gpu", "COMPLETED"),
    ]
    slots = sorted(log.message.split(" slot ")[1].split(" on ")[0] for log in logs if " has slot " in log.message)
    # A trial that started after the other had ended took the same slot.
    assert slots in (["1 of 2", "2 of 2"], ["1 of 2", "1 of 2"])


@pytest.mark.fault
def test_cancelled_trial_is_not_repeated_and_a_cancelled_search_cancels_its_trials(stack, gpu_worker, make_images):
    """The search continues with the next trial; a trial that was cancelled with the search is repeated later."""
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "of-cancelled"))
    code = f"""
import sys, threading, time
import mlflow
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Cancelling
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import Choices, TuneConfig
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
    done = submit(stack, code)
    ended, states, flow_states, status = done.stdout.splitlines()[-4:]
    assert "'trial-1-" in ended, done.stdout + done.stderr
    assert ended.endswith("was cancelled: run again to train")
    assert states == "['cancelled', 'fail'] {'lakevision.cancelled': [0]}"
    assert flow_states == "['CANCELLED', 'CANCELLED']"
    assert status == "KILLED"


@pytest.fixture(scope="module")
def api(stack):
    """Return an HTTP client that is logged in to the stack's server and has a CSRF token."""
    with httpx.Client(base_url=f"{stack.url}/api", headers=authorization(stack.auth_string), timeout=120) as client:
        token = client.get("/csrf-token", params={"client": "test"}).raise_for_status().json()["token"]
        client.headers.update({"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"})
        yield client


def read_deployment(api: httpx.Client, name: str) -> dict:
    """Return a deployment of the stack's server."""
    return api.get(f"/deployments/name/{name}").raise_for_status().json()


@pytest.mark.parametrize("interface", ["", "/v2"], ids=["first", "second"])
def test_form_shows_common_settings_first(stack, api, interface):
    """Source, model, weights and image size are on the first screen, and groups are folded.

    No property is None, and a required setting is not called optional.
    """
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
            lines = text.splitlines()
            assert ("Source" in lines, "Source (Optional)" in lines, "Tables (Optional)" in lines) == (
                True,
                False,
                True,
            )
            assert "(16 to 1024)" in text
            # A field of a group, and the group itself.
            assert "Stored Side" not in text
            assert "Ingestion of a folder of images into the Delta tables" in text
        # The form of photos lacks one required field, and names it on submission.
        submit = [button for button in browser.find_elements(By.TAG_NAME, "button") if button.text.strip() == "Submit"]
        submit[0].click()
        message = "'source (your folder of class folders, or builtin:digits)' is a required property"
        wait.until(lambda page: message in text_of(page))
        # The digits' tables accept no other source: photos have their own tables, which the form shows.
        assert find_field(browser, "Tables").get_attribute("value") == "photos-tables"


@pytest.mark.parametrize("interface", ["", "/v2"], ids=["first", "second"])
def test_page_of_predictions_shows_thumbnails_and_literal_names(stack, api, interface):
    """Each least sure image is drawn in its row, and the failed files follow."""
    image = PredictedImage(
        path="cat/1.png", label="<b>cat</b>", probability=0.5, thumbnail=thumbnail(encoded(noise(200, 100)))
    )
    report = PredictReport(
        predictions=TableRef(path="/tables/predictions", version=2), model=ModelRef(name="m", version=1, run_id="r"),
        predicted=1, errors=1, seconds=1.0, csv="/home/predictions.csv", num_files=2, num_failed=1,
        failed=(FailedFile(path="bad![](x).png", error="not_an_image: x"),), least_confident=(image,),
    )  # fmt: skip
    artifact = {"key": "predictions", "type": "markdown", "data": answers_markdown(report)}
    created = api.post("/artifacts/", json=artifact).raise_for_status().json()["id"]
    with chromium() as browser:
        wait = WebDriverWait(browser, WAIT_SECONDS)
        browser.get(f"{stack.url}/login")
        log_in(browser, stack.auth_string)
        wait.until(lambda page: not page.current_url.endswith("/login"))
        browser.get(f"{stack.url}{interface}/artifacts/artifact/{created}")
        (shown,) = wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, "td img"))
        wait.until(lambda page: page.execute_script("return arguments[0].naturalWidth", shown) == SIDE)
        assert shown.size["width"] >= SIDE // 2
        text = text_of(browser)
        assert all(words in text for words in ("<b>cat</b>", "0.5000", "cat/1.png", "bad![](x).png", "not_an_image: x"))


def form_errors(api, photos: dict, config: dict) -> dict[str, str]:
    """Return the errors that the form of the deployment shows for a configuration, by setting."""
    values = {"schema": photos["parameter_openapi_schema"], "values": {"config": config}}

    def flat(errors: list, place: str = "") -> dict[str, str]:
        found = {}
        for error in errors:
            if isinstance(error, str):
                found[place] = error
            else:
                found |= flat(error["errors"], ".".join(filter(None, (place, error["property"]))))
        return found

    return flat(api.post("/ui/schemas/validate", json=values).json()["errors"])


@pytest.mark.parametrize(
    ("config", "expected"),
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
    ],
)
def test_invalid_config_is_rejected_before_submission(api, config, expected):
    """The form names every wrong field at once, and the server creates no run for any client."""
    photos = read_deployment(api, "pipeline/photos")
    errors = form_errors(api, photos, config)
    assert errors.keys() == {f"config.{name}" for name in expected}
    assert all(text in errors[f"config.{name}"] for name, text in expected.items())
    answer = api.post(f"/deployments/{photos['id']}/create_flow_run", json={"parameters": {"config": config}})
    assert answer.status_code == 409
    assert any(text in answer.json()["detail"] for text in expected.values())


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"source": "/a", "weights": "none", "recipe": "head"}, "train.recipe"),
        ({"source": "/a", "weights": "none", "freeze_backbone": True}, "train.freeze_backbone"),
        (
            {"source": "/a", "freeze_backbone": False, "train": {"fine_tune": [{"unfreeze_from": "all"}]}},
            "train.fine_tune",
        ),
        ({"source": "/a", "train": {"schedule": "one_cycle", "warmup_epochs": 2}}, "train.schedule"),
        ({"source": "/a", "etl": {"labels": {"by": "folder", "pattern": "(x)"}}}, "etl.labels.pattern"),
        ({"source": "/a", "etl": {"labels": {"by": "file"}}}, "etl.labels.by"),
        ({"source": "/a", "etl": {"split_by": "file"}}, "etl.split_by"),
        ({"source": "/a", "etl": {"split_by": "file", "labels": {"by": "folder"}}}, "etl.split_by"),
        ({"source": "/a", "predict": {"alias": "best"}}, "predict.alias"),
    ],
)
def test_settings_that_contradict_each_other_pass_the_form_and_fail_the_run(api, config, setting):
    """The form has no rules across fields; the model refuses them before a stage begins, and names the setting."""
    assert form_errors(api, read_deployment(api, "pipeline/photos"), config) == {}

    with pytest.raises(ValidationError) as refused:
        PipelineConfig.model_validate(config)

    assert invalid_settings(refused.value).setting == setting


@pytest.mark.parametrize(
    "config",
    [
        {"source": "/a", "weights": "none", "freeze_backbone": False, "model_name": "mine"},
        {"etl": {"source": "/a"}, "train": {"weights": "none", "freeze_backbone": False}},  # settings by group
        {"source": "/a", "weights": "none", "train": {"freeze_backbone": False}},
        {"source": "/a", "storage": {"home": None}, "train": {"max_seconds": None}, "cache": {"keep_days": 0}},
        {"source": "/a", "etl": {"labels": {"by": "file", "file": "s3a://b/labels.CSV"}, "split_by": "file"}},
        {"source": "/a", "etl": {"labels": {"by": "folder", "pattern": None, "file": ""}}},
        {"source": "/a", "train": {"schedule": "one_cycle", "warmup_epochs": 0.0, "fine_tune": []}},
    ],
)
def test_valid_config_is_accepted(api, config):
    """The server accepts a valid config, and so do the models that the flow validates it with."""
    PipelineConfig.model_validate(config)
    photos = read_deployment(api, "pipeline/photos")
    answer = api.post(f"/deployments/{photos['id']}/create_flow_run", json={"parameters": {"config": config}})
    assert answer.status_code == 201, answer.text
    api.delete(f"/flow_runs/{answer.json()['id']}").raise_for_status()


@pytest.mark.fault
def test_cancelled_stream_shows_its_progress_and_leaves_no_process(stack, make_images, tmp_path, caplog, messages_of):
    """Its artifact changes while it runs, its JVM and workers end with the run, and a run that waits continues it."""
    source, storage, running = make_images(per_class=12), make_storage(stack.home), threading.Event()
    shown, ended, errors = [], [], []
    promote_best([log_run(storage, tmp_path, 1, 0.9)], PromoteConfig(model_name="of-stream"), storage)
    config = {
        "predict": {"source": str(source), "batch_size": 8},
        "promote": {"model_name": "of-stream"},
        "stream": {"interval_seconds": 1},
        "spark": {"driver_memory": "1g"},
    }

    def add(name: str, num: int) -> None:
        new = stack.home / name
        new.mkdir()
        for file in sorted((source / "red").iterdir())[:num]:
            (new / file.name).write_bytes(file.read_bytes() + name.encode())
        new.rename(source / name)

    def run_and_cancel() -> None:
        with client_of(stack) as client:
            deployment = client.read_deployment_by_name("predict-stream/predict-stream")
            run = client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
            wanted = {"flow_run_id": {"any_": [run.id]}}
            of_stream = ArtifactFilter.model_validate(wanted | {"key": {"any_": ["stream"]}})

            def behind_after(predicted: str) -> list[str]:
                while True:
                    rows = [json.loads(one.data) for one in client.read_artifacts(artifact_filter=of_stream)]
                    if any(row[0]["images predicted"] == predicted for row in rows):
                        return [row[0]["behind"] for row in rows]
                    assert not client.read_flow_run(run.id).state.is_final()
                    time.sleep(1)

            try:
                shown.append(behind_after("36"))
                running.set()
                add("added", 2)
                shown.append(behind_after("38"))
                while is_in_batch(storage):
                    time.sleep(0.01)
                add("later", 12)
                while not is_in_batch(storage):
                    time.sleep(0.01)
            finally:  # The run that waits for this one would never begin.
                running.set()
                client.set_flow_run_state(run.id, Cancelling())
            while not (run := client.read_flow_run(run.id)).state.is_final():
                time.sleep(0.2)
            ended.append(run.state)
            time.sleep(1)
            logs = client.read_logs(LogFilter.model_validate(wanted))
            errors.extend(record.message for record in logs if record.level >= logging.ERROR)

    before = set(marked(stack))
    stack.start("worker-cpu", worker_command("cpu"))
    worker = dict(stack._processes)["worker-cpu"]
    try:
        with ThreadPoolExecutor(1) as pool, caplog.at_level("INFO", "lakevision.locks"):
            submitted = pool.submit(run_and_cancel)
            while not running.wait(0.1):
                assert not submitted.done(), submitted.result()
            report = stream(storage, "of-stream", source=str(source))
            submitted.result()
    finally:
        worker.terminate()
        worker.wait(timeout=60)
    assert shown == [["none"], ["none"]], "one artifact, which is updated"
    assert [(state.name, state.message) for state in ended] == [("Cancelled", "The flow run was cancelled.")]
    assert errors == []
    assert set(marked(stack)) <= before
    assert "another run writes to" in "".join(messages_of("lakevision.locks"))
    # The batch of the cancelled run, unless it ended before it was cancelled.
    assert report.batches in {0, 1}
    assert report.files_behind == 0
    rows = delta_rows(DeltaTable(storage.table("predictions")), "sha256")
    assert (len(rows), len(set(rows["sha256"].to_pylist()))) == (50, 50)


def test_rejected_and_cancelled_runs_show_the_reason_on_their_pages(stack, gpu_worker, make_images):
    """The error is the message of the state and an artifact of parent and child; a cancelled run is not crashed.

    No log has a traceback, and no process of the cancelled run is left.
    """
    cache = hand_made_cache(make_images(), str(stack.home / "cache" / "of-ended"))
    code = f"""
import os, time
from flows.decorator import dag_flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter
from prefect.states import Cancelling
from tasks.config.distributed import DistributedConfig, TrainDistributedRun
from tasks.config.train import TrainConfig
from tasks.launch.task import submit_train_distributed
from tasks.errors import WrongInput
from tasks.orchestration.stage import run_stage
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
wrong = train.model_copy(update={{"weights": "/etc/passwd"}})
one_rank = distributed.model_copy(update={{"num_ranks": 1}})
state = only_submit(TrainDistributedRun(train=wrong, distributed=one_rank), return_state=True)
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
    print("train.weights" in explanation(client, child.id), link in explanation(client, parent.id))
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
    log = stack.log_file("worker-gpu")
    before = log.stat().st_size
    done = submit(stack, code)
    left = rank_processes(str(stack.home))
    end_gpu_worker(stack)  # Its log is complete.
    assert done.returncode == 0, done.stdout + done.stderr
    raised, messages, explained, traceback, all_ranks, cancelled, errors = done.stdout.splitlines()[-7:]
    assert raised == "raised as WrongInput"
    (message,) = ast.literal_eval(messages)
    assert message.startswith("train.weights is '/etc/passwd', which is not a state dict")
    assert explained == "True True"
    assert traceback == "False"
    assert all_ranks == "True"
    # The message of the run's own process: its worker cancels later, after another import of the flow.
    assert cancelled == ("Cancelled The flow run was cancelled. [('train-ranks', 'Cancelled')]")
    assert errors == "[]"
    assert left == []
    assert b"Traceback" not in log.read_bytes()[before:]


def test_scheduled_runs_do_not_pile_up_behind_a_long_run(stack):
    """A scheduled run is skipped while its deployment has a run; a run that a user starts or retries waits."""
    with client_of(stack) as client:
        deployment = client.read_deployment_by_name("predict-batch/predict-batch").id

        def ask_for_slot(*tags: str) -> UUID:
            tagged = ["lakevision", *tags]  # as the scheduler and a submission pass them on
            run = client.create_flow_run_from_deployment(deployment, tags=tagged)
            client.set_flow_run_state(run.id, Pending())
            return run.id

        retried = ask_for_slot("auto-scheduled")
        for state in (Running(), Failed()):  # It leaves the slot.
            client.set_flow_run_state(retried, state)
        running = ask_for_slot("auto-scheduled")
        client.set_flow_run_state(retried, Pending())  # by the button Retry
        started, scheduled = ask_for_slot(), ask_for_slot("auto-scheduled")
        deadline = time.monotonic() + 60
        while (state := client.read_flow_run(scheduled).state).name != "Skipped":
            assert time.monotonic() < deadline, state
            time.sleep(0.3)
        assert (state.type.value, state.message.split(";")[0]) == ("CANCELLED", "The run before it has not ended")
        names = [client.read_flow_run(run).state.name for run in (running, started, retried)]
        assert names == ["Pending", "AwaitingConcurrencySlot", "AwaitingConcurrencySlot"]
        for run in (running, started, retried):
            client.set_flow_run_state(run, Cancelled(), force=True)


KILLED_REGISTRATION = """
import os
from deployments.stack import register
register.restore_edits = lambda *_given: os._exit(9)
register.main([])
"""
"""A registration that is killed after it has deployed, before it restores the user's edits."""


def test_redeployment_keeps_edits_of_a_user_and_ends_only_runs_of_an_earlier_stack(stack):
    """Every start of a stack deploys again, and keeps a user's edits of a deployment, its schedules and pools.

    So does the start after a killed registration, and after a record was cut.
    Old runs would hold the pool's only slot, or start with old parameters; a cancelling one ends as cancelled.
    """
    end_gpu_worker(stack)  # It would end the cancelling run.
    edits = {
        "parameters": {"config": {"etl": {"source": "/data/mine"}}},
        "tags": ["lakevision", "mine"],
        "job_variables": {"env": {"MINE": "1"}},
        "concurrency_limit": 2,
        "description": "My images.",
    }
    own = {"config": {"max_epochs": 9}}
    with client_of(stack) as client:
        pipeline = client.read_deployment_by_name("pipeline/pipeline")
        later, added = CronSchedule(cron="0 5 * * *", timezone="UTC"), CronSchedule(cron="7 7 * * *", timezone="UTC")
        client.update_deployment_schedule(
            pipeline.id, pipeline.schedules[0].id, active=True, schedule=later, parameters=own
        )
        client.create_deployment_schedules(pipeline.id, [(added, True)])  # as the UI does, without a slug
        client.update_deployment(pipeline.id, DeploymentUpdate.model_validate(edits))
        client.update_work_pool("gpu", WorkPoolUpdate(concurrency_limit=3))

    def make() -> list[UUID]:
        made = []
        with client_of(stack) as client:
            deployment = client.read_deployment_by_name("train-distributed/train-distributed")
            for states in ([Running()], [Running(), Cancelling()]):
                run = client.create_flow_run_from_deployment(deployment.id)
                for state in states:
                    client.set_flow_run_state(run.id, state, force=True)
                made.append(run.id)
        return made

    before, began, after = make(), datetime.now(UTC).isoformat(), make()
    killed = submit(stack, KILLED_REGISTRATION)
    assert killed.returncode == 9, killed.stderr
    with client_of(stack) as client:
        assert client.read_deployment_by_name("pipeline/pipeline").description != "My images."
    record = stack.home / "prefect" / "deployed.json"
    for since in ([began], []):  # twice: an edit survives any number of starts
        stack.start("register", [sys.executable, "-m", "deployments.stack.register", *since])
        stack.finish("register")
        with client_of(stack) as client:
            names = ("pipeline/pipeline", "predict-batch/predict-batch")
            pipeline, other = (client.read_deployment_by_name(name) for name in names)
            limit = client.read_work_pool("gpu").concurrency_limit
            states = [client.read_flow_run(run).state.type.value for run in before + after]
        schedules = {entry.schedule.cron: (entry.active, entry.parameters) for entry in pipeline.schedules}
        assert schedules == {"0 5 * * *": (True, own), "7 7 * * *": (True, {})}
        assert [(entry.schedule.cron, entry.active) for entry in other.schedules] == [("0 * * * *", False)]
        found = {name: getattr(pipeline, name) for name in edits.keys() - {"concurrency_limit"}}
        assert found | {"concurrency_limit": pipeline.global_concurrency_limit.limit} == edits
        assert limit == 3
        assert states == ["CRASHED", "CANCELLED", "RUNNING", "CANCELLING"]
        assert not (stack.home / "prefect" / "edited.json").exists()
    record.write_bytes(record.read_bytes()[:100])
    stack.start("register", [sys.executable, "-m", "deployments.stack.register"])
    stack.finish("register")
    with client_of(stack) as client:
        assert client.read_deployment_by_name("pipeline/pipeline").parameters == edits["parameters"]


def test_ended_stack_leaves_no_process(stack):  # the last test that uses the stack
    """A process that leads its own session is found by the stack's mark, and the port is free."""
    stack.start("worker-cpu", worker_command("cpu"))
    stray = subprocess.Popen(["sleep", "600"], env=stack.environment, start_new_session=True)
    # The environment of a process is readable a moment after its start.
    deadline = time.monotonic() + 10
    while stray.pid not in marked(stack):
        assert time.monotonic() < deadline, "the new process carries no mark"
        time.sleep(0.05)
    stack.end()
    stray.wait(timeout=10)
    assert marked(stack) == []
    listen(stack.port, "the Prefect server", "set LAKEVISION_PORT").close()
