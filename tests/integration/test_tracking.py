"""MLflow on a real database: experiments, runs, artifacts, and servers that do not answer."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import mlflow
import pytest
import torch
from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from tasks.config.storage import StorageConfig
from tasks.errors import AccessDenied, TrackingUnavailable, WrongInput
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import save_classifier
from tasks.refs import RunRef, TableRef
from tasks.storage import resolve_storage
from tasks.tracking import server
from tasks.tracking.models import register_run
from tasks.tracking.runs import (
    find_data_checks,
    find_finished_run,
    find_unfinished_run,
    has_run,
    log_data_checks,
    read_artifact,
    run_location,
    run_metrics,
)
from tasks.tracking.searches import parent_run, trial_tags
from tasks.tracking.sender import MetricSender
from tasks.tracking.tracked_run import TrackedRun, TrainingData, monitors, tracked_run
from tasks.tracking.trained import newest_training
from tests.builders.processes import ROOT, plain_environment, run_python


def test_artifact_location_of_an_existing_experiment_cannot_change(storage, tmp_path):
    """MLflow would silently write to the old location; an empty setting means that location."""
    home = storage.home
    server.check_tracking(resolve_storage(StorageConfig(home=home, artifacts=str(tmp_path / "first"))))
    server.check_tracking(resolve_storage(StorageConfig(home=home)))
    with pytest.raises(WrongInput, match="storage.artifacts is '.*/second'") as refused:
        server.check_tracking(resolve_storage(StorageConfig(home=home, artifacts=str(tmp_path / "second"))))
    assert refused.value.setting == "storage.artifacts"


def test_database_whose_creation_was_killed_is_created_by_the_next_process(tmp_path):
    """Half of its migrations would leave a database that no run can use."""
    home = tmp_path / "new home"
    storage = resolve_storage(StorageConfig(home=str(home)))
    code = """
import sys
from tasks.config.storage import StorageConfig
from tasks.storage import resolve_storage
from tasks.tracking.server import prepare_tracking
prepare_tracking(resolve_storage(StorageConfig(home=sys.argv[1])))
"""
    with subprocess.Popen([sys.executable, "-c", code, str(home)], cwd=ROOT) as process:
        new = home / "mlflow.db.new"
        while not new.is_file() or new.stat().st_size < 50_000:  # of 900 kB
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    assert not (home / "mlflow.db").exists()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(server.prepare_tracking, [storage, storage])
    assert first == second
    assert not list(home.glob("mlflow.db.*"))  # neither the unfinished database nor the lock of its creation
    assert (home / "mlflow.db").stat().st_mode & 0o777 == 0o600


def test_tracking_server_that_does_not_answer_is_named(tmp_path, monkeypatch):
    """The check before a run names the setting and its value."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    storage = resolve_storage(StorageConfig(home=str(tmp_path), tracking="http://127.0.0.1:9"))
    with pytest.raises(WrongInput, match="storage.tracking is 'http://127.0.0.1:9'") as refused:
        server.check_tracking(storage)
    assert refused.value.setting == "storage.tracking"


@contextmanager
def broken_server(*, answers: bytes | None) -> Iterator[tuple[str, list[int]]]:
    """Yield the URL of a server and its number of requests; it gives each the same answer, or never answers."""
    num_requests, connections = [0], []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):  # The socket was closed.
                while True:
                    connection, _address = listening.accept()
                    num_requests[0] += 1
                    connections.append(connection)
                    if answers is not None:
                        connection.recv(1 << 16)
                        connection.sendall(answers)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", num_requests
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()


UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("outage", ["no listener", "closes", "answers 503", "never answers"])
def test_tracking_server_outage_is_reported_within_seconds(tmp_path, monkeypatch, outage):
    """Without variables of MLflow, the check takes seconds; MLflow's defaults would take more than four minutes."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server, "FIRST_TIMEOUT_SECONDS", 1)
    answers = {"closes": b"", "answers 503": UNAVAILABLE}.get(outage)
    before = dict(os.environ)
    with broken_server(answers=answers) as (url, num_requests):
        wanted = "http://127.0.0.1:9" if outage == "no listener" else url
        storage = resolve_storage(StorageConfig(home=str(tmp_path), tracking=wanted))
        began = time.monotonic()
        with pytest.raises(WrongInput, match=f"'{wanted}', which does not answer") as refused:
            server.check_tracking(storage)
        assert refused.value.setting == "storage.tracking"
        assert time.monotonic() - began < 60
        assert num_requests[0] == (0 if outage == "no listener" else 1 + server.FIRST_RETRIES)
        assert not server.is_available(storage)
    assert {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_HTTP")} == {
        name: value for name, value in before.items() if name.startswith("MLFLOW_HTTP")
    }


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"401 Unauthorized", "denies access"),
        (b"403 Forbidden", "denies access"),
        (b"404 Not Found", "answers with an error"),
        (b"200 OK", "answers with an error"),  # the page of another service
    ],
)
def test_tracking_server_that_refuses_is_not_called_silent(tmp_path, answer, what):
    """A login that is missing or refused is said, with the variables to set, before a run and in a later stage."""
    answers = b"HTTP/1.1 " + answer + b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    with broken_server(answers=answers) as (url, _num_requests):
        storage = resolve_storage(StorageConfig(home=str(tmp_path), tracking=url))
        with pytest.raises(WrongInput, match=f"'{url}', which {what} ") as refused:
            server.check_tracking(storage)
        assert refused.value.setting == "storage.tracking"
        assert ("MLFLOW_TRACKING_TOKEN" in str(refused.value)) == (what == "denies access")
        if what == "denies access":
            with pytest.raises(AccessDenied, match=f"'{url}' denies access .*: set MLFLOW_TRACKING_TOKEN"):
                find_finished_run(storage, "key")


def test_deleted_experiment_is_refused_before_work_and_can_be_restored(storage):
    """Preflight names the experiment and the command that restores it; MLflow's UI still starts."""
    training, data = server.prepare_tracking(storage), server.prepare_data_tracking(storage)
    client = server.client_of(storage)
    for name, experiment in (("lakevision", training), ("lakevision-data", data)):
        client.delete_experiment(experiment)
        with pytest.raises(WrongInput, match=f"the experiment '{name}' .* was deleted in MLflow") as refused:
            server.check_tracking(storage, data=True)
        assert f"'mlflow experiments restore --experiment-id {experiment}'" in refused.value.way_out
        assert f"MLFLOW_TRACKING_URI set to '{storage.tracking}'" in refused.value.way_out
        if name == "lakevision":
            with pytest.raises(WrongInput, match="was deleted in MLflow"):
                find_finished_run(storage, "key")
        else:
            server.check_tracking(storage)  # A training run does not need it.
        server.prepare_database(storage)
        # In a process of its own: in this one, another test may have set a tracking server, which would count.
        command = ("-m", "mlflow", "experiments", "restore", "--experiment-id", experiment)
        done = run_python(*command, environment=plain_environment(MLFLOW_TRACKING_URI=storage.tracking), timeout=120)
        assert done.returncode == 0, done.stderr
        server.check_tracking(storage, data=True)


def test_renamed_experiment_is_named_where_its_runs_are_missed(storage, caplog):
    """The new experiment is created with a warning, and a promotion says where the runs are."""
    training = server.prepare_tracking(storage)
    server.client_of(storage).rename_experiment(training, "flowers")
    assert server.prepare_tracking(storage) != training
    assert "the experiment 'lakevision' is created: the runs of 'flowers'" in caplog.text
    with pytest.raises(WrongInput, match="no finished training run: the runs of 'flowers', which had this name"):
        newest_training(storage)


def test_retries_before_a_run_follow_the_variables_of_mlflow(tmp_path, monkeypatch):
    """A user can raise the number of retries, for a server that starts slowly."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with broken_server(answers=UNAVAILABLE) as (url, num_requests):
        with pytest.raises(WrongInput, match="which does not answer"):
            server.check_tracking(resolve_storage(StorageConfig(home=str(tmp_path), tracking=url)))
        assert num_requests[0] == 6


def test_outage_during_a_training_run_is_one_line_for_every_request(tmp_path, monkeypatch):
    """An outage is not a user error: run again once the server is back, the training run resumes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "http://bob:hunter2@127.0.0.1:9")
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    text = r"^the tracking server 'http://\*\*\*@127.0.0.1:9' does not answer \(.*\): fix it and run again, training"
    with pytest.raises(TrackingUnavailable, match=text) as raised:
        find_finished_run(storage, "key")
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))
    assert "\n" not in str(raised.value)
    with pytest.raises(TrackingUnavailable, match=text):
        MetricSender(storage, "run").steps_sent("val_loss")
    with pytest.raises(TrackingUnavailable, match=text), tracked_run(storage, "run", "key", {}, {}, None):
        pytest.fail("it cannot have begun")
    for ask in (run_metrics, run_location, lambda *given: read_artifact(*given, "card.md")):
        with pytest.raises(TrackingUnavailable, match=text):
            ask(storage, RunRef(run_id="run"))
    with pytest.raises(TrackingUnavailable, match=text):
        has_run(storage, "run")


def test_other_errors_of_a_tracking_server_are_not_changed(storage):
    """A missing run is not reported as an outage."""
    server.prepare_tracking(storage)
    with pytest.raises(MlflowException, match="not found"), server.translate_outage(storage):
        mlflow.MlflowClient(tracking_uri=storage.tracking).get_run("0" * 32)


def test_table_that_is_logged_again_replaces_the_first(storage):
    """A run that logs its tables again after a resume has each row once; MLflow's own function appends."""
    with tracked_run(storage, "test", "key", {}, {}, None) as run:
        for recall in (0.25, 0.5):
            run.log_table({"class": ["ant", "bee"], "recall": [1.0, recall]}, "classes.json")
    content = read_artifact(storage, RunRef(run_id=run.run_id), "classes.json")
    assert content is not None
    assert json.loads(content) == {"columns": ["class", "recall"], "data": [["ant", 1.0], ["bee", 0.5]]}
    tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "classes.json", "type": "table"}]


def test_missing_artifact_is_none(storage):
    """Runs of older versions have fewer artifacts."""
    with tracked_run(storage, "test", "key", {}, {}, None) as run:
        run.log_text("# a card", "model_card.md")
    assert read_artifact(storage, RunRef(run_id=run.run_id), "model_card.md") == b"# a card"
    assert read_artifact(storage, RunRef(run_id=run.run_id), "other.md") is None


def test_run_has_system_metrics_every_two_seconds_or_as_configured(storage, monkeypatch):
    """A short run would have no system metrics with MLflow's default interval of 10 s."""
    monkeypatch.setenv(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.name, "0.5")
    with tracked_run(storage, "chosen", "one", {}, {}, None) as run:
        assert monitors[run.run_id].sampling_interval == 0.5
    monkeypatch.delenv(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.name)
    wanted = {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"}
    with tracked_run(storage, "default", "two", {}, {}, None) as run:
        assert monitors[run.run_id].sampling_interval == 2.0
        deadline = time.monotonic() + 60
        while not wanted <= run_metrics(storage, RunRef(run_id=run.run_id)).keys():
            assert time.monotonic() < deadline, "no system metric was logged"
            time.sleep(0.2)


def test_resumed_run_keeps_the_code_version_of_its_start(storage, monkeypatch):
    """The code that wrote the checkpoint is the code of the model."""
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    with tracked_run(storage, "test", "key", {}, {}, None) as run:
        assert run.code_version == "first"
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    with tracked_run(storage, "test", "key", {}, {}, run.run_id) as resumed:
        assert resumed.code_version == "first"


def test_run_without_metrics_of_an_epoch_is_resumed(storage, monkeypatch):
    """A run killed before its first metric is resumed; runs with metrics, finished runs and other code are not."""
    config = {"train": {"seed": 1, "max_epochs": 2}}
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    assert find_unfinished_run(storage, "key") is None
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    # Killed right after the run was created.
    experiment = server.prepare_tracking(storage)
    begun = client.create_run(experiment, tags={"lakevision.key": "key"}).info.run_id
    assert find_unfinished_run(storage, "key") == begun
    assert find_unfinished_run(storage, "other") is None
    # Interrupted before the first epoch, with system metrics alone.
    with suppress(KeyboardInterrupt), tracked_run(storage, "test", "key", config, {}, begun) as run:
        run.log_metrics({"system/cpu_utilization_percentage": 1.0}, step=0)
        raise KeyboardInterrupt
    found = client.get_run(begun)
    assert found.info.status == "KILLED"
    assert found.data.params["train.max_epochs"] == "2"
    assert found.data.params.keys() >= {"version.torch", "version.mlflow"}
    assert found.data.tags["lakevision.code_version"] == "first"
    assert json.loads(read_artifact(storage, RunRef(run_id=begun), "config.json") or b"") == config
    assert find_unfinished_run(storage, "key") == begun
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    assert find_unfinished_run(storage, "key") is None
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    with tracked_run(storage, "test", "key", config, {}, begun) as run:
        run.log_metrics({"val_loss": 1.0}, step=0)
        assert find_unfinished_run(storage, "key") is None
    assert client.get_run(begun).info.status == "FINISHED"
    with tracked_run(storage, "test", "finished", config, {}, None):
        pass
    assert find_unfinished_run(storage, "finished") is None


def test_password_in_the_tracking_uri_is_not_shown(tmp_path, monkeypatch):
    """Messages and settings, which the form of a run shows, have no password; it is only in the environment."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "http://bob:hunter2@127.0.0.1:9")
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    assert "hunter2" in storage.tracking
    with pytest.raises(WrongInput, match=r"'http://\*\*\*@127.0.0.1:9'") as rejected:
        server.check_tracking(storage)
    assert rejected.value.setting == "storage.tracking"
    assert "hunter2" not in "".join(traceback.format_exception(rejected.value))
    assert "hunter2" not in storage.as_config().model_dump_json()
    assert resolve_storage(storage.as_config()) == storage
    with pytest.raises(ValidationError, match="a user name or password"):
        StorageConfig(tracking="postgresql://bob:hunter2@127.0.0.1/mlflow")


def test_experiments_open_with_a_list_of_runs_and_their_metrics(storage):
    """Tags of MLflow's UI choose the view, and a user's change of them stays."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    metrics = {}
    for name, prepare in (
        ("lakevision", server.prepare_tracking),
        ("lakevision-data", server.prepare_data_tracking),
    ):
        found = client.get_experiment(prepare(storage))
        assert found.name == name
        assert found.tags["mlflow.experimentKind"] == "custom_model_development"
        view = json.loads(found.tags["mlflow.sharedViewState.lakevision"])
        metrics[name] = json.loads(view["state"])["selectedColumns"]
    assert "metrics.`test_accuracy`" in metrics["lakevision"]
    assert "metrics.`near_duplicates`" in metrics["lakevision-data"]
    training = server.prepare_tracking(storage)
    assert server.runs_location(storage) == (
        f"/#/experiments/{training}/runs?workflowType=machine_learning&viewStateShareKey=lakevision"
    )
    client.set_experiment_tag(training, "mlflow.experimentKind", "genai_development")
    assert server.prepare_tracking(storage) == training
    assert client.get_experiment(training).tags["mlflow.experimentKind"] == "genai_development"


def test_experiment_of_an_older_version_gets_missing_tags(storage, tmp_path):
    """Runs and artifact location stay, and earlier data validations are still found."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    elsewhere = (tmp_path / "elsewhere").as_uri()
    old = client.create_experiment("lakevision", elsewhere, tags={"mlflow.note.content": "mine"})
    run = client.create_run(old, tags={"lakevision.key": "checks"})
    client.log_dict(run.info.run_id, {"leaked": 0}, "data_validation.json")
    client.set_terminated(run.info.run_id)
    assert find_data_checks(storage, "checks") == {"leaked": 0}
    assert find_data_checks(storage, "others") is None
    tags = client.get_experiment(old).tags
    assert (tags["mlflow.experimentKind"], tags["mlflow.note.content"]) == ("custom_model_development", "mine")
    data = client.get_experiment(server.prepare_data_tracking(storage))
    assert (data.name, data.artifact_location) == ("lakevision-data", elsewhere)
    log_data_checks(storage, "data-validation v1", "others", {"leaked": 1}, {}, {"images": 3.0}, {})
    assert find_data_checks(storage, "others") == {"leaked": 1}
    assert [found.info.run_id for found in client.search_runs([old])] == [run.info.run_id]


def test_run_and_registered_version_have_data_and_model_card(storage, tmp_path):
    """A resumed run has its datasets once; a model card that is too long is cut for the registry."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    table = TableRef(path=storage.table("images"), version=3, table_id="a27e")
    data = TrainingData(table, "0123456789abcdef" * 4, {"train": 8, "val": 1, "test": 2}, "/data/photos")
    card = "# model\n" + "".join(f"\n## chapter {number}\n\n{'words ' * 150}\n" for number in range(8))
    torch.manual_seed(0)
    classifier = build_classifier("squeezenet1_1", "none", 2, freeze_backbone=False)
    save_classifier(tmp_path / "model", "squeezenet1_1", classifier.state_dict(), ("ant", "bee"), 32)
    with tracked_run(storage, "test", "key", {}, {}, None) as run:
        run.log_data(data)
    with tracked_run(storage, "test", "key", {}, {}, run.run_id) as run:
        run.log_data(data)
        run.describe(card)
        run.log_model(tmp_path / "model")
    found = client.get_run(run.run_id)
    assert sorted(logged.dataset.name for logged in found.inputs.dataset_inputs) == [
        "photos v3 test",
        "photos v3 train",
        "photos v3 val",
    ]
    assert found.data.tags["mlflow.note.content"] == card
    model = register_run(storage, RunRef(run_id=run.run_id), "photos")
    description = client.get_model_version("photos", str(model.version)).description
    assert description.startswith(card[:4000])
    assert len(description) <= 5000
    assert "`model_card.md` of the training run" in description


def test_resumed_search_logs_missing_parameters(storage):
    """A killed search may have logged some parameters; a resumed one adds the others and changes none."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    experiment = server.prepare_tracking(storage)
    about = {"train": {"seed": 1, "model": "resnet18"}, "tune": {"seed": 2}}
    begun = client.create_run(experiment, tags={"lakevision.key": "study-1"}).info.run_id
    client.log_param(begun, "train.seed", 1)
    for given in (about, about | {"tune": {"seed": 3}}):
        with parent_run(storage, "tune", "study-1", given, {}) as parent:
            assert parent.run_id == begun
        found = client.get_run(begun)
        assert found.info.status == "FINISHED"
        assert found.data.params == {"train.seed": "1", "train.model": "resnet18", "tune.seed": "2"}
        assert json.loads(read_artifact(storage, RunRef(run_id=begun), "config.json") or b"") == about


def test_run_of_a_cancelled_trial_is_killed(storage):
    """Only unfinished runs of the trial itself are ended."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    with parent_run(storage, "tune", "study-1", {}, {}) as parent:
        experiment = server.prepare_tracking(storage)
        runs = [
            client.create_run(experiment, tags=trial_tags(parent.run_id, number)).info.run_id for number in (0, 1, 10)
        ]
        client.set_terminated(runs[0])
        parent.end_trial(0)
        parent.end_trial(1)
        parent.end_trial(7)
        states = [client.get_run(run).info.status for run in runs]
    assert states == ["FINISHED", "KILLED", "RUNNING"]


def test_runs_that_begin_at_once_on_the_same_data_all_have_their_datasets(storage):
    """MLflow looks for a dataset before it adds it, and another run may add it in between."""
    server.prepare_tracking(storage)
    client = mlflow.MlflowClient(storage.tracking)
    for version in range(3):
        data = TrainingData(TableRef(path="/t", version=version), "c" * 64, {"train": 8, "test": 2}, None)
        runs = [client.create_run("0").info.run_id for _ in range(6)]
        together = threading.Barrier(len(runs))

        def log(run_id: str, data=data, together=together) -> None:
            together.wait()
            TrackedRun(storage, run_id).log_data(data)

        with ThreadPoolExecutor(len(runs)) as pool:
            list(pool.map(log, runs))
        assert [len(client.get_run(run_id).inputs.dataset_inputs) for run_id in runs] == [2] * len(runs)
