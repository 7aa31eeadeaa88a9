"""MLflow on a real database: what it refuses, and what a run holds."""

import json
import os
import socket
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

from tasks import tracking
from tasks.config import StorageConfig
from tasks.errors import TrackingAway, WrongInput
from tasks.predict.model import save_classifier
from tasks.predict.package import FILE_LIMITS
from tasks.refs import RunRef, TableRef
from tasks.storage import resolve_storage
from tasks.tracking import server
from tasks.train.model import build_classifier


def test_artifacts_cannot_move_under_an_experiment_that_is_there(tmp_path):
    """MLflow would go on writing to the old place without a word; an empty setting means that place."""
    home = str(tmp_path / "home")
    tracking.check_tracking(resolve_storage(StorageConfig(home=home, artifacts=str(tmp_path / "first"))))
    tracking.check_tracking(resolve_storage(StorageConfig(home=home)))
    with pytest.raises(WrongInput, match=r"storage.artifacts is '.*/second', but the experiment 'lakevision' of"):
        tracking.check_tracking(resolve_storage(StorageConfig(home=home, artifacts=str(tmp_path / "second"))))


def test_a_tracking_server_that_does_not_answer_is_named(tmp_path, monkeypatch):
    """Before any work, with the way out."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    storage = resolve_storage(StorageConfig(home=str(tmp_path), tracking="http://127.0.0.1:9"))
    with pytest.raises(WrongInput, match="storage.tracking is 'http://127.0.0.1:9', which does not answer"):
        tracking.check_tracking(storage)


@contextmanager
def broken_server(*, answers: bytes | None) -> Iterator[tuple[str, list[int]]]:
    """Give the URL of a server and the number of requests it got: to each it says this, or nothing for ever."""
    asked, held = [0], []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):  # It was closed.
                while True:
                    connection, _address = listening.accept()
                    asked[0] += 1
                    held.append(connection)
                    if answers is not None:
                        connection.recv(1 << 16)
                        connection.sendall(answers)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("away", ["nobody listens", "closes", "says that it is unavailable", "says nothing"])
def test_a_tracking_server_that_is_away_is_refused_within_seconds(tmp_path, monkeypatch, away):
    """As a person has it, who sets no variable of MLflow's; with its own, it asks for four minutes and more."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server, "FIRST_TIMEOUT_SECONDS", 1)
    answers = {"closes": b"", "says that it is unavailable": UNAVAILABLE}.get(away)
    before = dict(os.environ)
    with broken_server(answers=answers) as (url, asked):
        wanted = "http://127.0.0.1:9" if away == "nobody listens" else url
        storage = resolve_storage(StorageConfig(home=str(tmp_path), tracking=wanted))
        began = time.monotonic()
        with pytest.raises(WrongInput, match=f"storage.tracking is '{wanted}', which does not answer"):
            tracking.check_tracking(storage)
        assert time.monotonic() - began < 60
        assert asked[0] == (0 if away == "nobody listens" else 1 + server.FIRST_RETRIES)
        assert not tracking.answers(storage)
    assert {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_HTTP")} == {
        name: value for name, value in before.items() if name.startswith("MLFLOW_HTTP")
    }


def test_how_long_a_server_is_asked_before_work_is_what_somebody_chose(tmp_path, monkeypatch):
    """By MLflow's own variables: of a server that takes a while to wake up."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with broken_server(answers=UNAVAILABLE) as (url, asked):
        with pytest.raises(WrongInput, match="which does not answer"):
            tracking.check_tracking(resolve_storage(StorageConfig(home=str(tmp_path), tracking=url)))
        assert asked[0] == 6


def test_a_tracking_server_that_went_away_is_one_sentence_wherever_a_training_asks_it(tmp_path, monkeypatch):
    """It is no wrong input: run again when it is back, the training goes on."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "http://bob:hunter2@127.0.0.1:9")
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    said = r"^the tracking server 'http://\*\*\*@127.0.0.1:9' does not answer \(.*\): mend it and run again, what was"
    with pytest.raises(TrackingAway, match=said) as away:
        tracking.find_finished_run(storage, "key")
    assert "hunter2" not in "".join(traceback.format_exception(away.value))
    assert "\n" not in str(away.value)
    with pytest.raises(TrackingAway, match=said):
        tracking.MetricSender(storage, "run").steps_sent("val_loss")
    with pytest.raises(TrackingAway, match=said), tracking.tracked_run(storage, "run", "key", {}, {}, None):
        pytest.fail("it cannot have begun")
    for ask in (tracking.run_metrics, tracking.run_location, lambda *given: tracking.read_artifact(*given, "card.md")):
        with pytest.raises(TrackingAway, match=said):
            ask(storage, RunRef(run_id="run"))
    with pytest.raises(TrackingAway, match=said):
        tracking.has_run(storage, "run")


def test_another_error_of_a_tracking_server_is_what_it_is(tmp_path):
    """A run that is not there is no server that is away."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    tracking.prepare_tracking(storage)
    with pytest.raises(MlflowException, match="not found"), tracking.away_named(storage):
        mlflow.MlflowClient(tracking_uri=storage.tracking).get_run("0" * 32)


def test_a_table_that_is_logged_again_replaces_the_first(tmp_path):
    """A training that was resumed after it had logged its tables has each row once; MLflow's own function appends."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        for recall in (0.25, 0.5):
            run.log_table({"class": ["ant", "bee"], "recall": [1.0, recall]}, "classes.json")
    content = tracking.read_artifact(storage, RunRef(run_id=run.run_id), "classes.json")
    assert content is not None
    assert json.loads(content) == {"columns": ["class", "recall"], "data": [["ant", 1.0], ["bee", 0.5]]}
    tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "classes.json", "type": "table"}]


def test_an_artifact_that_is_not_there_is_none(tmp_path):
    """Runs of an older version have fewer."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        run.log_text("# a card", "model_card.md")
    assert tracking.read_artifact(storage, RunRef(run_id=run.run_id), "model_card.md") == b"# a card"
    assert tracking.read_artifact(storage, RunRef(run_id=run.run_id), "other.md") is None


def test_a_run_has_system_metrics_every_two_seconds_or_as_often_as_somebody_chose(tmp_path, monkeypatch):
    """MLflow's own ten are more than a short training takes, which would have none."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    monkeypatch.setenv(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.name, "0.5")
    with tracking.tracked_run(storage, "chosen", "one", {}, {}, None) as run:
        assert MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() == 0.5
    monkeypatch.delenv(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.name)
    wanted = {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"}
    with tracking.tracked_run(storage, "default", "two", {}, {}, None) as run:
        assert MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() == 2.0
        deadline = time.monotonic() + 60
        while not wanted <= tracking.run_metrics(storage, RunRef(run_id=run.run_id)).keys():
            assert time.monotonic() < deadline, "no sample came"
            time.sleep(0.2)


def test_a_resumed_run_keeps_the_code_version_it_began_with(tmp_path, monkeypatch):
    """What made the checkpoint is what made the model."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        assert run.code_version == "first"
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    with tracking.tracked_run(storage, "test", "key", {}, {}, run.run_id) as resumed:
        assert resumed.code_version == "first"


def test_a_run_that_was_begun_and_has_measured_nothing_is_gone_on_with(tmp_path, monkeypatch):
    """Wherever its process was killed; one that measured, finished, or ran other code is another's."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    config = {"train": {"seed": 1, "max_epochs": 2}}
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    assert tracking.find_begun_run(storage, "key") is None
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    # Killed as soon as the run was made.
    experiment = tracking.prepare_tracking(storage)
    begun = client.create_run(experiment, tags={"lakevision.key": "key"}).info.run_id
    assert tracking.find_begun_run(storage, "key") == begun
    assert tracking.find_begun_run(storage, "other") is None
    # Ended before the first epoch, with system metrics alone.
    with suppress(KeyboardInterrupt), tracking.tracked_run(storage, "test", "key", config, {}, begun) as run:
        run.log_metrics({"system/cpu_utilization_percentage": 1.0}, step=0)
        raise KeyboardInterrupt
    found = client.get_run(begun)
    assert found.info.status == "KILLED"
    assert found.data.params["train.max_epochs"] == "2"
    assert found.data.params.keys() >= {"version.torch", "version.mlflow"}
    assert found.data.tags["lakevision.code_version"] == "first"
    assert json.loads(tracking.read_artifact(storage, RunRef(run_id=begun), "config.json") or b"") == config
    assert tracking.find_begun_run(storage, "key") == begun
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    assert tracking.find_begun_run(storage, "key") is None
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    with tracking.tracked_run(storage, "test", "key", config, {}, begun) as run:
        run.log_metrics({"val_loss": 1.0}, step=0)
        assert tracking.find_begun_run(storage, "key") is None
    assert client.get_run(begun).info.status == "FINISHED"
    with tracking.tracked_run(storage, "test", "finished", config, {}, None):
        pass
    assert tracking.find_begun_run(storage, "finished") is None


def test_a_password_in_the_tracking_uri_is_shown_to_nobody(tmp_path, monkeypatch):
    """Not in what is said of it, not in settings, which a submitted run's form shows: only in the environment."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "http://bob:hunter2@127.0.0.1:9")
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    assert "hunter2" in storage.tracking
    with pytest.raises(WrongInput, match=r"'http://\*\*\*@127.0.0.1:9', which does not answer") as refused:
        tracking.check_tracking(storage)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
    assert "hunter2" not in storage.as_config().model_dump_json()
    assert resolve_storage(storage.as_config()) == storage
    with pytest.raises(ValidationError, match="a user name or password"):
        StorageConfig(tracking="postgresql://bob:hunter2@127.0.0.1/mlflow")


def test_both_experiments_open_on_their_runs_with_metrics_in_the_list(tmp_path):
    """By the tags that MLflow's UI reads; what a user changed there stays."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    metrics = {}
    for name, prepare in (
        ("lakevision", tracking.prepare_tracking),
        ("lakevision-data", tracking.prepare_data_tracking),
    ):
        found = client.get_experiment(prepare(storage))
        assert found.name == name
        assert found.tags["mlflow.experimentKind"] == "custom_model_development"
        view = json.loads(found.tags["mlflow.sharedViewState.lakevision"])
        metrics[name] = json.loads(view["state"])["selectedColumns"]
    assert "metrics.`test_accuracy`" in metrics["lakevision"]
    assert "metrics.`near_duplicates`" in metrics["lakevision-data"]
    training = tracking.prepare_tracking(storage)
    assert tracking.runs_location(storage) == (
        f"/#/experiments/{training}/runs?workflowType=machine_learning&viewStateShareKey=lakevision"
    )
    client.set_experiment_tag(training, "mlflow.experimentKind", "genai_development")
    assert tracking.prepare_tracking(storage) == training
    assert client.get_experiment(training).tags["mlflow.experimentKind"] == "genai_development"


def test_an_experiment_that_an_older_version_made_gets_what_it_lacks(tmp_path):
    """Its runs and its place of artifacts stay; data validations of then are found where they are."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    elsewhere = (tmp_path / "elsewhere").as_uri()
    old = client.create_experiment("lakevision", elsewhere, tags={"mlflow.note.content": "mine"})
    run = client.create_run(old, tags={"lakevision.key": "checks"})
    client.log_dict(run.info.run_id, {"leaked": 0}, "data_validation.json")
    client.set_terminated(run.info.run_id)
    assert tracking.find_data_checks(storage, "checks") == {"leaked": 0}
    assert tracking.find_data_checks(storage, "others") is None
    tags = client.get_experiment(old).tags
    assert (tags["mlflow.experimentKind"], tags["mlflow.note.content"]) == ("custom_model_development", "mine")
    data = client.get_experiment(tracking.prepare_data_tracking(storage))
    assert (data.name, data.artifact_location) == ("lakevision-data", elsewhere)
    tracking.log_data_checks(storage, "data-validation v1", "others", {"leaked": 1}, {}, {"images": 3.0}, {})
    assert tracking.find_data_checks(storage, "others") == {"leaked": 1}
    assert [found.info.run_id for found in client.search_runs([old])] == [run.info.run_id]


def test_a_run_has_its_data_and_its_card_and_so_has_the_registered_version(tmp_path):
    """Logged again by a resumed training, the data is there once; a card that is too long is cut for the registry."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    table = TableRef(path=storage.table("images"), version=3, table_id="a27e")
    data = tracking.TrainingData(table, "0123456789abcdef" * 4, {"train": 8, "val": 1, "test": 2}, "/data/photos")
    card = "# model\n" + "".join(f"\n## chapter {number}\n\n{'words ' * 150}\n" for number in range(8))
    torch.manual_seed(0)
    classifier = build_classifier("squeezenet1_1", "none", 2, freeze_backbone=False)
    save_classifier(tmp_path / "model", "squeezenet1_1", classifier.state_dict(), ("ant", "bee"), 32)
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        run.log_data(data)
    with tracking.tracked_run(storage, "test", "key", {}, {}, run.run_id) as run:
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
    model = tracking.register_run(storage, RunRef(run_id=run.run_id), "photos", FILE_LIMITS)
    description = client.get_model_version("photos", str(model.version)).description
    assert description.startswith(card[:4000])
    assert len(description) <= 5000
    assert "`model_card.md` of the training run" in description


def test_a_search_that_was_killed_before_it_described_itself_is_described_by_the_next(tmp_path):
    """The run was made and perhaps given some parameters; what a search that goes on finds written stays."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    experiment = tracking.prepare_tracking(storage)
    about = {"train": {"seed": 1, "model": "resnet18"}, "tune": {"seed": 2}}
    begun = client.create_run(experiment, tags={"lakevision.key": "study-1"}).info.run_id
    client.log_param(begun, "train.seed", 1)
    for given in (about, about | {"tune": {"seed": 3}}):
        with tracking.parent_run(storage, "tune", "study-1", given, {}) as parent:
            assert parent.run_id == begun
        found = client.get_run(begun)
        assert found.info.status == "FINISHED"
        assert found.data.params == {"train.seed": "1", "train.model": "resnet18", "tune.seed": "2"}
        assert json.loads(tracking.read_artifact(storage, RunRef(run_id=begun), "config.json") or b"") == about


def test_a_cancelled_trial_leaves_no_run_that_seems_to_go_on(tmp_path):
    """Its own alone, and not one that has finished."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    with tracking.parent_run(storage, "tune", "study-1", {}, {}) as parent:
        experiment = tracking.prepare_tracking(storage)
        runs = [
            client.create_run(experiment, tags=tracking.trial_tags(parent.run_id, number)).info.run_id
            for number in (0, 1, 10)
        ]
        client.set_terminated(runs[0])
        parent.end_trial(0)
        parent.end_trial(1)
        parent.end_trial(7)
        states = [client.get_run(run).info.status for run in runs]
    assert states == ["FINISHED", "KILLED", "RUNNING"]


def test_runs_that_begin_at_once_on_the_same_data_all_have_their_datasets(storage):
    """As the trials of a search do: MLflow looks for a dataset first, and another run may add it in between."""
    tracking.prepare_tracking(storage)
    client = mlflow.MlflowClient(storage.tracking)
    for version in range(3):
        data = tracking.TrainingData(TableRef(path="/t", version=version), "c" * 64, {"train": 8, "test": 2}, None)
        runs = [client.create_run("0").info.run_id for _ in range(6)]
        together = threading.Barrier(len(runs))

        def log(run_id: str, data=data, together=together) -> None:
            together.wait()
            tracking.TrackedRun(run_id, None).log_data(data)

        with ThreadPoolExecutor(len(runs)) as pool:
            list(pool.map(log, runs))
        assert [len(client.get_run(run_id).inputs.dataset_inputs) for run_id in runs] == [2] * len(runs)
