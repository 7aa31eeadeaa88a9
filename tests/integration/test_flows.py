"""Flows called as Python functions, under Prefect's test harness."""

import base64
import io
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

import mlflow
import numpy as np
import pytest
import torch
from PIL import Image
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, LogFilter
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from safetensors.torch import load_file

from flows.decorator import DagFlow, dag_flow
from flows.etl import etl
from flows.repeat import repeat
from flows.train import train
from flows.train_distributed import train_distributed
from flows.train_trial import train_trial
from flows.tune import tune
from tasks.config.checks import RepeatRun
from tasks.config.distributed import TrainDistributedRun
from tasks.config.etl import EtlConfig, EtlRun
from tasks.config.frozen import FrozenConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig, TrainRun
from tasks.config.tune import TrialRun, TuneRun
from tasks.errors import DiskFull, TimeLimitExceeded, WrongInput, join_names
from tasks.etl.task import publish_tables
from tasks.etl.validate import BadFile, DataChecks, NearPair
from tasks.launch.task import train_single, train_with_artifacts
from tasks.orchestration.cancellation import is_being_cancelled
from tasks.orchestration.failure import noted_error
from tasks.orchestration.progress_artifacts import progress_artifacts
from tasks.orchestration.stage import run_stage, stage
from tasks.predict.task import publish_predictions
from tasks.progress.count import advance, counted
from tasks.refs import EtlReport, FailedFile, ModelRef, PredictedImage, PredictReport, RunRef, StreamReport, TableRef
from tasks.report.page import MAX_IMAGE_BYTES
from tasks.report.task import publish_run
from tasks.storage import Storage
from tasks.stream.run import Lag, StreamCounts
from tasks.stream.task import StreamArtifact, progress_row
from tasks.tracking.server import prepare_tracking
from tasks.tracking.tracked_run import tracked_run
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.processes import rank_processes


@pytest.fixture(autouse=True)
def _server(prefect_harness):
    """Run all tests of this module against the harness."""


def run_etl(storage, source):
    """Run the ETL flow and return its state."""
    config = EtlRun(storage=StorageConfig(home=storage.home), etl=EtlConfig(source=str(source)))
    return etl(config, return_state=True)


def test_etl_flow_reports_no_change_when_repeated_and_publishes_the_data_set(spark, storage, source):
    """A second run reports that nothing changed, and the artifacts show classes and checks."""
    first = run_etl(storage, source)
    assert first.result().stored == 60
    second = run_etl(storage, source)
    assert second.result().changed is False
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter.model_validate({"key": {"any_": ["data-set", "data-validation"]}})
        artifacts = client.read_artifacts(artifact_filter=wanted)
    found = {artifact.key: str(artifact.data) for artifact in artifacts}
    assert '"class": "red"' in found["data-set"]
    assert '"check": "leaked", "value": "0"' in found["data-validation"]


def test_user_errors_are_not_retried_and_other_errors_are(monkeypatch):
    """A retry cannot fix a user error."""
    calls = {"wrong": 0, "lost": 0}

    @stage("wrong")
    def wrong() -> None:
        calls["wrong"] += 1
        raise WrongInput("a sentence")

    @stage("lost")
    def lost() -> None:
        calls["lost"] += 1
        raise ConnectionError("lost")

    @flow
    def both() -> None:
        wrong(return_state=True)
        lost.with_options(retry_delay_seconds=0)(return_state=True)

    both(return_state=True)
    assert calls == {"wrong": 1, "lost": 3}


def wait_for_logs(run_id: Any, pattern: str | None = None, num_lines: int = 1) -> list[tuple[int, str]]:
    """Wait until the log of a flow run has `num_lines` lines, one of which matches; return levels and texts."""
    wanted = LogFilter.model_validate({"flow_run_id": {"any_": [run_id]}})
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while len(found := client.read_logs(wanted)) < num_lines or (
            pattern is not None and not any(re.search(pattern, record.message) for record in found)
        ):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
    return [(record.level, record.message) for record in found]


def explanation_of(run_id: Any) -> str:
    """Return the artifact that explains the failure of a flow run."""
    wanted = {"flow_run_id": {"any_": [run_id]}, "key": {"any_": ["what-went-wrong"]}}
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    return str(artifact.data)


@pytest.mark.parametrize("kind", [WrongInput, DiskFull, TimeLimitExceeded])
def test_user_error_is_the_message_of_the_state_and_an_artifact_without_a_traceback(kind, storage):
    """A direct call raises the error of the stage, with and without `run_stage`, and an error is never cached."""
    problem, way_out = "storage.tables is 'http://me:hidden@host', which cannot be written to", "give another folder"
    calls = []

    @stage("refuse", retries=0, cache_key=lambda _context, _parameters: f"refused-{kind.__name__}")
    def refuse() -> None:
        calls.append(1)
        raise kind(problem, setting="storage.tables", way_out=way_out)

    @dag_flow("refusing")
    def refusing(config: EtlRun) -> None:
        with pytest.raises(kind, match="storage.tables is"):
            refuse()
        run_stage(refuse)

    config = EtlRun(storage=StorageConfig(home=storage.home))
    with pytest.raises(kind) as raised:
        refusing(config)
    assert str(raised.value) == f"{problem}: {way_out}".replace("me:hidden", "***")
    assert len(calls) == 2

    state = refusing(config, return_state=True)
    run_id = state.state_details.flow_run_id
    message = f"storage.tables is 'http://***@host', which cannot be written to: give another folder ({kind.__name__})"
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run_id).state.message == message
    artifact = explanation_of(run_id)
    assert "- Setting: `storage.tables`" in artifact
    assert "hidden" not in artifact
    wait_for_logs(run_id, "Finished in state")
    # The lines of a run may arrive after its last one, which has the sentence in it, too.
    shown = message.removesuffix(f" ({kind.__name__})")
    lines = wait_for_logs(run_id, f"^{re.escape(shown)}$")
    assert (logging.ERROR, shown) in lines
    assert [text for _level, text in lines if "Traceback" in text or "hidden" in text] == []


def test_invalid_settings_are_refused_in_one_sentence_without_a_traceback(caplog):
    """The setting is named as in the form, and Prefect does not log all parameters."""
    state = etl({"etl": {"max_bad_fraction": 7}}, return_state=True)
    sentence = "config.etl.max_bad_fraction is 7: input should be less than or equal to 1"
    with pytest.raises(WrongInput, match="config.etl.max_bad_fraction is 7: "):
        state.result()
    # The submitting run restores the error, and does not submit again after a user error.
    run_id = state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        restored = noted_error(client.read_flow_run(run_id).labels, state.message)
    assert isinstance(restored, WrongInput)
    assert str(restored) == sentence
    assert restored.setting == "etl.max_bad_fraction"
    assert "- Setting: `etl.max_bad_fraction`" in explanation_of(run_id)
    assert any(record.levelno == logging.ERROR and sentence in record.getMessage() for record in caplog.records)
    assert not any(record.exc_info or "Parameters:" in record.getMessage() for record in caplog.records)


def run_until_sigterm(flow: Any, storage: Storage) -> None:
    """Run a flow that sends its own process SIGTERM."""
    # Prefect forwards the signal to the previous handler.
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    try:
        with pytest.raises(TerminationSignal):
            flow(EtlRun(storage=StorageConfig(home=storage.home)))
    finally:
        signal.signal(signal.SIGTERM, before)


def check_cancelled(run_id: UUID) -> None:
    """Check that a flow run and its only task run are Cancelled."""
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run_id).state.name == "Cancelled"
        of_run = FlowRunFilter.model_validate({"id": {"any_": [run_id]}})
        deadline = time.monotonic() + 30
        while [run.state.name for run in client.read_task_runs(flow_run_filter=of_run)] != ["Cancelled"]:
            assert time.monotonic() < deadline, client.read_task_runs(flow_run_filter=of_run)
            time.sleep(0.2)


def test_deleted_run_is_not_being_cancelled(monkeypatch):
    """The process of a deleted run may still get a signal, and queries the state in a log filter."""
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))
    assert flow_run.get_id() is not None
    assert not is_being_cancelled()


def test_cancelled_run_ends_as_cancelled_even_if_the_cleanup_of_its_task_fails(storage):
    """Cleanup fails if the signal reached the JVM too; the task is not retried, and no crash is logged."""
    calls = []

    @stage("tear", retries=2)
    def tear() -> None:
        calls.append(UUID(str(flow_run.id)))
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(calls[0], Cancelling())
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            raise ConnectionError("the JVM is gone")

    @dag_flow("torn")
    def torn(config: EtlRun) -> None:
        run_stage(tear)

    run_until_sigterm(torn, storage)
    assert len(calls) == 1
    lines = wait_for_logs(calls[0], num_lines=2)
    check_cancelled(calls[0])
    assert [text for level, text in lines if level >= logging.ERROR or "Crash" in text] == []


def test_cancellation_during_a_retry_delay_is_not_a_crash(storage):
    """Prefect waits outside the stage's function, and would treat the signal as a crash."""
    calls, is_waiting = [], threading.Event()

    def cancel_during_delay(run_id: UUID) -> None:
        # From the engine's log: the server receives task states later, as events.
        is_waiting.wait(60)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, Cancelling())
        os.kill(os.getpid(), signal.SIGTERM)

    def detect_wait(record: logging.LogRecord) -> bool:
        if "will start" in record.getMessage():
            is_waiting.set()
        return True

    @stage("lose")
    def lose() -> None:
        calls.append(UUID(str(flow_run.id)))
        threading.Thread(target=cancel_during_delay, args=[calls[0]], daemon=True).start()
        raise ConnectionError("lost")

    @dag_flow("losing")
    def losing(config: EtlRun) -> None:
        run_stage(lose.with_options(retry_delay_seconds=120))

    logging.getLogger("prefect.task_runs").addFilter(detect_wait)
    try:
        run_until_sigterm(losing, storage)
    finally:
        logging.getLogger("prefect.task_runs").removeFilter(detect_wait)
    assert len(calls) == 1
    lines = wait_for_logs(calls[0], num_lines=3)
    check_cancelled(calls[0])
    # The failure before the retry is logged as an error.
    assert [text for _level, text in lines if "Crash" in text] == []
    assert [text for level, text in lines if level >= logging.ERROR and "ConnectionError" not in text] == []


def test_password_in_an_unexpected_error_is_masked(storage):
    """Message, artifact and traceback have no password, and the error is retried as usual."""
    # Not a literal in the raising line: a traceback shows lines of code.
    calls, text_of_error = [], "API request to http://me:hidden@127.0.0.1:9/api/2.0 failed"

    @stage("ask", retries=1)
    def ask() -> None:
        calls.append(1)
        raise mlflow.MlflowException(text_of_error)

    @dag_flow("asking")
    def asking(config: EtlRun) -> None:
        run_stage(ask.with_options(retry_delay_seconds=0))

    state = asking(EtlRun(storage=StorageConfig(home=storage.home)), return_state=True)
    run_id = state.state_details.flow_run_id
    assert len(calls) == 2
    of_run = FlowRunFilter.model_validate({"id": {"any_": [run_id]}})
    deadline = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        messages = [client.read_flow_run(run_id).state.message]
        while not (runs := client.read_task_runs(flow_run_filter=of_run)) or runs[0].state.name != "Failed":
            assert time.monotonic() < deadline
            time.sleep(0.2)
    messages += [runs[0].state.message, explanation_of(run_id), str(state.result(raise_on_failure=False))]
    assert all("http://***@127.0.0.1:9/api/2.0 failed" in message.replace("\\*", "*") for message in messages)
    lines = [text for _level, text in wait_for_logs(run_id, "Traceback")]
    assert [text for text in [*messages, *lines] if "hidden" in text] == []


def test_unexpected_error_keeps_its_traceback_and_its_location_is_in_the_artifact(storage):
    """The log has the traceback, and the artifact the project's file and line that raised the error."""

    @stage("break", retries=0)
    def break_down() -> None:
        join_names(["a"], None)

    @dag_flow("breaking")
    def breaking(config: EtlRun) -> None:
        run_stage(break_down)

    state = breaking(EtlRun(storage=StorageConfig(home=storage.home)), return_state=True)
    run_id = state.state_details.flow_run_id
    artifact = explanation_of(run_id)
    assert "**TypeError: " in artifact
    assert "`tasks/errors.py, line " in artifact
    wait_for_logs(run_id, "Traceback")


@pytest.mark.parametrize(
    ("started", "config"),
    [
        (train, TrainRun()),
        (train_distributed, TrainDistributedRun()),
        (train_trial, TrialRun()),
        (tune, TuneRun()),
        (repeat, RepeatRun()),
        (repeat, RepeatRun(run_id="some")),
    ],
    ids=lambda given: given.name if isinstance(given, DagFlow) else "",
)
def test_unreachable_tracking_server_is_an_error_of_every_training_flow(
    started: DagFlow[Any, Any], config: FrozenConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is checked before tables and models, and is not reported as a missing run."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    unreachable = StorageConfig(home=str(tmp_path), tracking="http://127.0.0.1:9")
    with pytest.raises(WrongInput, match="storage.tracking is 'http://127.0.0.1:9'"):
        started(config.model_copy(update={"storage": unreachable}))


def logged_weights(storage: Storage) -> dict[str, torch.Tensor]:
    """Return the weights of the only training run of a storage."""
    (file,) = Path(storage.home).rglob("weights.safetensors")
    return load_file(file)


def test_killed_training_run_is_retried_by_prefect_in_one_mlflow_run(source, storage, make_home):
    """Killed when its MLflow run exists and again after an epoch, it creates no other run and repeats no epoch.

    Losses and weights are bit-identical to those of an undisturbed run.
    """
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    experiment = prepare_tracking(storage)
    killed: list[int] = []

    def kill_when(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if condition() and (ranks := [rank.pid for rank in rank_processes(storage.home) if rank.pid not in killed]):
                os.kill(ranks[0], signal.SIGKILL)
                killed.extend(ranks)
                return
            time.sleep(0.05)

    def kill_twice() -> None:
        kill_when(lambda: client.search_runs([experiment]))
        kill_when(lambda: list(storage.checkpoints.glob("*/best-*.pt")))

    killer = threading.Thread(target=kill_twice)
    killer.start()
    train = TrainConfig(
        model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=10, patience=10
    )
    without_delay = train_single.with_options(retry_delay_seconds=0)
    run = flow(lambda: without_delay(train, cache, storage), name="killed-twice")()
    killer.join()
    assert len(killed) == 2
    found = client.search_runs([experiment])
    assert [(one.info.run_id, one.info.status) for one in found] == [(run.run_id, "FINISHED")]
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run.run_id, "val_loss")]
    assert [epoch for epoch, _loss in losses] == list(range(10))
    other_storage = make_home("undisturbed")
    other = train_model(TrainingSpec(train=train, cache=cache, storage=other_storage))
    other_client = mlflow.MlflowClient(tracking_uri=other_storage.tracking)
    assert losses == [
        (metric.step, metric.value) for metric in other_client.get_metric_history(other.run_id, "val_loss")
    ]
    undisturbed, killed_twice = logged_weights(other_storage), logged_weights(storage)
    assert all(torch.equal(killed_twice[name], undisturbed[name]) for name in undisturbed)


def test_training_continues_after_a_user_deletes_its_progress_artifact(source, storage, messages_of):
    """The deletion is logged, and the training run finishes."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["progress-removed-epochs"]))
    removed = []

    def remove() -> None:
        deadline = time.monotonic() + 60
        with get_client(sync_client=True) as client:
            while time.monotonic() < deadline and not removed:
                for artifact in client.read_artifacts(artifact_filter=wanted):
                    client.delete_artifact(artifact.id)
                    removed.append(artifact.id)

    remover = threading.Thread(target=remove)
    remover.start()
    train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False, max_epochs=2)
    spec = TrainingSpec(train=train, distributed=None, cache=cache, storage=storage)

    def train_shown() -> RunRef:
        with progress_artifacts():
            return train_with_artifacts(spec, "progress-removed")

    run = flow(train_shown, name="progress-removed")()
    remover.join()
    assert len(removed) == 1
    assert mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).info.status == "FINISHED"
    # Logged once, by the thread that writes all progress.
    assert [line.partition(" could not be shown: ")[0] for line in messages_of("lakevision.progress")] == [
        "the progress of 'progress-removed-epochs'"
    ]


def test_stage_that_counts_images_has_a_progress_artifact(monkeypatch):
    """The artifact has the number of images done, the rate and the remaining time, and ends at 100 %."""
    monkeypatch.setattr("tasks.progress.count.UPDATE_SECONDS", 0.0)
    shown = []

    def progress_of(run_id):
        wanted = {"flow_run_id": {"any_": [run_id]}, "key": {"any_": ["etl-progress"]}}
        with get_client(sync_client=True) as client:
            return client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))

    @stage("count", retries=0)
    def count_images() -> None:
        with counted("etl", 8):
            advance("etl", "0", 2)
            deadline = time.monotonic() + 60
            while not any(float(str(one.data)) == 25.0 for one in progress_of(flow_run.id)):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            shown.append(progress_of(flow_run.id)[0].description)

    @flow
    def counting() -> None:
        count_images()

    state = counting(return_state=True)
    state.result()
    assert re.fullmatch(r"2 of 8 images, [\d,]+ images/s, .* left", shown[0])
    (artifact,) = progress_of(state.state_details.flow_run_id)
    assert float(str(artifact.data)) == 100.0
    assert artifact.description.startswith("8 of 8 images, ")


def test_running_stream_has_one_artifact_that_is_updated():
    """The table has the results so far and the lag; an update adds no second artifact."""
    table = TableRef(path="/tables/predictions", version=2)
    model = ModelRef(name="photos", version=3, run_id="run")

    def report(batches: int, files_behind: int) -> StreamReport:
        counts = StreamCounts(batches=batches, predicted=10 * batches, seconds=float(batches), unreadable=1)
        return counts.report(table, model, Lag(0, 90.0 if files_behind else 0.0, files_behind))

    @flow
    def streaming() -> None:
        artifact = StreamArtifact()
        artifact.write("stream", lambda: report(1, 7))
        artifact.write("stream", lambda: report(2, 0))

    state = streaming(return_state=True)
    state.result()
    wanted = {"flow_run_id": {"any_": [state.state_details.flow_run_id]}}
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    assert (artifact.key, artifact.type) == ("stream", "table")
    assert artifact.description == "Rows merged into `/tables/predictions`, now version 2"
    (row,) = json.loads(artifact.data)
    assert row == progress_row(report(2, 0))
    assert (row["batches"], row["images/s"], row["behind"], row["oldest not processed"]) == ("2", "10", "none", "none")
    assert progress_row(report(1, 7))["behind"] == "7 files"
    assert progress_row(report(1, 7))["oldest not processed"] == "90 s"


def test_unreachable_prefect_server_does_not_fail_a_stage_that_counts(caplog):
    """The failure is logged once."""
    done = []
    unreachable = {PREFECT_API_URL: "http://127.0.0.1:9/api"}
    with temporary_settings(unreachable), progress_artifacts(), counted("etl", 2):
        for image in (1, 2):
            advance("etl", "0", image)
            done.append(image)
    assert done == [1, 2]
    deadline = time.monotonic() + 60
    while not (logged := [record.getMessage() for record in caplog.records if record.name == "lakevision.progress"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(logged) == 1
    assert logged[0].startswith("the progress of 'etl' could not be shown: ")


def test_logs_of_plain_functions_and_of_spark_workers_reach_the_run(spark, storage, source):
    """The log of the flow run has lines of plain functions and of Spark workers."""
    state = run_etl(storage, source)
    flow_run_id = state.state_details.flow_run_id
    # Lines of another thread may arrive later than others.
    for text in ("60 files in", "worker: read"):
        assert any(text in line for _level, line in wait_for_logs(flow_run_id, text))


def test_training_run_publishes_classes_and_model_card(storage):
    """Figures are embedded in the model card, large ones as smaller JPEGs, with a link to the MLflow run."""
    card, small = "# a card", b"\x89PNG small"
    buffer = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    large = buffer.getvalue()
    assert len(large) > MAX_IMAGE_BYTES
    with tracked_run(storage, "test", "key", {}, {}, None) as tracked, TemporaryDirectory() as scratch:
        tracked.log_metrics({"test_accuracy": 0.5, "val_loss": 0.123456, "learning_rate": 0.0000123456}, step=0)
        tracked.log_table({"class": ["ant", "![](http://evil/x.png)"], "recall": [1.0, 0.5]}, "test_classes.json")
        tracked.log_text(card, "model_card.md")
        Path(scratch, "test_calibration.png").write_bytes(small)
        Path(scratch, "test_mistakes.png").write_bytes(large)
        for name in ("test_confusion.png", "learning_curves.png", "train_images.png"):
            Path(scratch, name).write_bytes(small)
        tracked.log_folder(Path(scratch), "")
        run = RunRef(run_id=tracked.run_id)

    publish_run(run, storage, "shown")

    keys = ["shown-metrics", "shown-run", "shown-classes", "shown-model-card"]
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate({"key": {"any_": keys}}))
    data = {artifact.key: str(artifact.data) for artifact in found}
    assert data.keys() == set(keys)
    assert json.loads(data["shown-metrics"]) == [
        {"metric": "learning_rate", "value": 0.00001235},
        {"metric": "test_accuracy", "value": 0.5},
        {"metric": "val_loss", "value": 0.1235},
    ]
    (link,) = (artifact for artifact in found if artifact.key == "shown-run")
    assert link.description.startswith("The training run in MLflow: settings, metrics per epoch")
    assert json.loads(data["shown-classes"]) == [
        {"class": "ant", "recall": 1.0},
        {"class": r"!\[\](http://evil/x.png)", "recall": 0.5},
    ]
    assert data["shown-model-card"].startswith(card)
    assert base64.b64encode(small).decode() in data["shown-model-card"]
    assert base64.b64encode(large[:90]).decode() not in data["shown-model-card"]
    gallery = re.search(r"!\[test_mistakes.png\]\(data:image/jpeg;base64,([^)]+)\)", data["shown-model-card"])
    assert gallery is not None
    content = base64.b64decode(gallery[1])
    assert len(small) + len(content) <= MAX_IMAGE_BYTES
    names = re.findall(r"!\[(\w+\.png)\]\(data:image", data["shown-model-card"])
    assert names[0] == "test_mistakes.png"
    assert {"test_confusion.png", "learning_curves.png", "train_images.png", "test_calibration.png"} <= set(names)
    with Image.open(io.BytesIO(content)) as rendition:
        assert rendition.format == "JPEG"
    assert f"/runs/{run.run_id}?workflowType=machine_learning)" in data["shown-model-card"]


PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACw="


def test_predictions_are_published_and_file_names_and_labels_are_escaped():
    """The UI renders tables as Markdown, in which file names and labels must stay plain text."""
    report = PredictReport(
        predictions=TableRef(path="/tables/predictions", version=2),
        model=ModelRef(name="photos", version=3, run_id="run"),
        predicted=2,
        errors=1,
        seconds=1.0,
        inputs=TableRef(path="/tables/inputs", version=1),
        unreadable=3,
        least_confident=(
            PredictedImage(
                path="dog/2.png", label="![](http://a)", probability=0.51234, unknown_score=0.75, thumbnail=PIXEL
            ),
        ),
        csv="/home/predictions.csv",
        num_files=2,
        num_failed=1,
        failed=(FailedFile(path="cat/[x](javascript:1).png", error="not_an_image: <b>"),),
    )
    state = flow(lambda: publish_predictions(report), name="predictions")(return_state=True)
    with get_client(sync_client=True) as client:
        wanted = {"flow_run_id": {"any_": [state.state_details.flow_run_id]}}
        (artifact,) = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    assert artifact.key == "predictions"
    assert "photos version 3; all predictions are in `/tables/predictions` version 2" in artifact.description
    assert artifact.description.endswith("version 2, their files in `/tables/inputs`. 3 files cannot be read")
    assert artifact.data.splitlines() == [
        "2 files, 1 of them failed: `/home/predictions.csv` has a row for each of the 2.",
        "",
        "## Least sure",
        "",
        "| image | label | probability | unknown score | file |",
        "| --- | --- | --- | --- | --- |",
        rf"| ![]({PIXEL}) | !\[\](http://a) | 0.5123 | 0.7500 | dog/2.png |",
        "",
        "## Failed: 1",
        "",
        "| file | error |",
        "| --- | --- |",
        r"| cat/\[x\](javascript:1).png | not_an_image: \<b\> |",
    ]


def test_names_in_the_tables_of_the_data_set_are_escaped(storage):
    """Names of classes, near-duplicates and quarantined files are untrusted input."""
    path, label = "cat/![x](http:&#47;&#47;evil.example&#47;x.png)", "![](http://evil/x.png)"
    table = TableRef(path="/tables/images", version=1)
    classes = {label: {"train": 1}}
    report = EtlReport(
        images=table, files=table, stored=1, duplicates=0, quarantined=1, read=2, changed=True, classes=classes
    )
    checks = DataChecks(
        images=table, files=table, classes=classes, outcomes={"stored": 1}, reasons={"unreadable": 1}, widths={},
        heights={}, leaked=0, near_duplicates=1, near_duplicates_complete=True, near_duplicate_bits=3,
        nearest=[NearPair(bits=1, path=path, label=label, split="train", other_path=path, other_label=label,
                          other_split="val")],
        quarantined=[BadFile(path=path, reason="unreadable", detail=label)],
    )  # fmt: skip
    state = flow(lambda: publish_tables(report, checks), name="tables")(return_state=True)
    state.result()
    with get_client(sync_client=True) as client:
        wanted = {"flow_run_id": {"any_": [state.state_details.flow_run_id]}}
        found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    data = {artifact.key: json.loads(artifact.data) for artifact in found}
    shown = r"cat/!\[x\](http:\&\#47;\&\#47;evil.example\&\#47;x.png)"
    assert data["data-set"][0]["class"] == r"!\[\](http://evil/x.png)"
    assert data["near-duplicates"][0]["path"] == data["near-duplicates"][0]["other_path"] == shown
    assert data["quarantined"][0]["path"] == shown
    # An unescaped bracket after an exclamation mark would start an image.
    assert not any(re.search(r"(?<!\\)\[", str(row)) for rows in data.values() for row in rows)
