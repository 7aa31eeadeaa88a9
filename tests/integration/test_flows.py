"""Flows as plain Python calls, under Prefect's test harness."""

import base64
import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from PIL import Image
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.decorator import DagFlow
from flows.etl import etl
from flows.repeat import repeat
from flows.train import train
from flows.train_distributed import train_distributed
from flows.train_trial import train_trial
from flows.tune import tune
from tasks import tracking
from tasks.config import (
    EtlConfig,
    EtlRun,
    RepeatRun,
    StorageConfig,
    TrainConfig,
    TrainDistributedRun,
    TrainRun,
    TrialRun,
    TuneRun,
)
from tasks.config.storage import Settings
from tasks.distributed.rank import RankSpec
from tasks.errors import WrongInput
from tasks.orchestration.task import stage
from tasks.predict.task import publish_predictions
from tasks.refs import ModelRef, PredictedImage, PredictReport, RunRef, TableRef
from tasks.storage import Storage, resolve_storage
from tasks.train.run import train_model
from tasks.train.task import MAX_PICTURE_BYTES, publish_run, train_single, train_with_artifacts
from tests.integration.hand_made import hand_made_cache
from tests.processes import rank_processes


@pytest.fixture(autouse=True)
def _server(prefect_harness):
    """Run every test here against the harness."""


def run_etl(storage, source):
    """Run the flow and return its state."""
    config = EtlRun(storage=StorageConfig(home=storage.home), etl=EtlConfig(source=str(source)))
    return etl(config, return_state=True)


def test_the_etl_flow_says_when_it_was_skipped_and_shows_the_data_set(spark, storage, source):
    """A second run of the same thing skips what is done, and says so."""
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


def test_wrong_input_is_not_retried_and_other_errors_are(monkeypatch):
    """Running again cannot help a person who made a mistake."""
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


@pytest.mark.parametrize(
    ("begun", "config"),
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
def test_a_training_refuses_a_tracking_server_that_is_away(
    begun: DagFlow[Any, Any], config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it looks at the tables or the network, and not as one that has no such run."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = StorageConfig(home=str(tmp_path), tracking="http://127.0.0.1:9")
    with pytest.raises(WrongInput, match="storage.tracking is 'http://127.0.0.1:9', which does not answer"):
        begun(config.model_copy(update={"storage": away}))


def logged_weights(storage: Storage) -> dict[str, torch.Tensor]:
    """Return the weights of the one training of a storage."""
    (file,) = Path(storage.home).rglob("weights.pt")
    weights: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return weights


def test_a_killed_training_is_retried_by_prefect_in_one_mlflow_run(source, storage, tmp_path):
    """Killed as soon as its MLflow run is there, and again after an epoch: no other run begins, no epoch is twice.

    Its losses and weights are those of the same training that nobody kills, bit for bit.
    """
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    experiment = tracking.prepare_tracking(storage)
    killed: list[int] = []

    def kill_when(is_time: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if is_time() and (ranks := [rank.pid for rank in rank_processes(storage.home) if rank.pid not in killed]):
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
    once = train_single.with_options(retry_delay_seconds=0)
    run = flow(lambda: once(train, cache, storage), name="killed-twice")()
    killer.join()
    assert len(killed) == 2
    found = client.search_runs([experiment])
    assert [(one.info.run_id, one.info.status) for one in found] == [(run.run_id, "FINISHED")]
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run.run_id, "val_loss")]
    assert [epoch for epoch, _loss in losses] == list(range(10))
    elsewhere = resolve_storage(StorageConfig(home=str(tmp_path / "undisturbed")))
    other = train_model(train, cache, elsewhere)
    its_client = mlflow.MlflowClient(tracking_uri=elsewhere.tracking)
    assert losses == [(metric.step, metric.value) for metric in its_client.get_metric_history(other.run_id, "val_loss")]
    undisturbed, killed_twice = logged_weights(elsewhere), logged_weights(storage)
    assert all(torch.equal(killed_twice[name], undisturbed[name]) for name in undisturbed)


def test_a_training_goes_on_when_a_person_removes_its_progress_bar(source, storage, said):
    """It is told, and the training ends as it would have."""
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
    spec = RankSpec(train=train, distributed=None, cache=cache, storage=storage)
    run = flow(lambda: train_with_artifacts(spec, "progress-removed"), name="progress-removed")()
    remover.join()
    assert len(removed) == 1
    assert mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).info.status == "FINISHED"
    assert [line.partition(" was not updated: ")[0] for line in said("lakevision.train")].count(
        "the progress artifact"
    ) == 3


def test_logs_of_plain_functions_and_of_spark_workers_reach_the_run(spark, storage, source):
    """A person looks in one place."""
    state = run_etl(storage, source)
    flow_run_id = state.state_details.flow_run_id
    wanted: list[str] = []
    deadline = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline and not any("worker: read" in line for line in wanted):
            from prefect.client.schemas.filters import LogFilter

            found = client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [flow_run_id]}}))
            wanted = [record.message for record in found]
            time.sleep(0.5)
    assert any("60 files in" in line for line in wanted)
    assert any("worker: read" in line for line in wanted)


def test_a_training_shows_its_classes_and_model_card_in_the_run(storage):
    """With figures in the text, a smaller rendition of what is too large, and a link to the run that has all."""
    card, small = "# a card", b"\x89PNG small"
    buffer = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    large = buffer.getvalue()
    assert len(large) > MAX_PICTURE_BYTES
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as tracked, TemporaryDirectory() as scratch:
        tracked.log_metrics({"test_accuracy": 0.5}, step=0)
        tracked.log_table({"class": ["ant", "bee"], "recall": [1.0, 0.5]}, "test_classes.json")
        tracked.log_text(card, "model_card.md")
        Path(scratch, "test_calibration.png").write_bytes(small)
        Path(scratch, "test_mistakes.png").write_bytes(large)
        tracked.log_folder(Path(scratch), "")
        run = RunRef(run_id=tracked.run_id)

    publish_run(run, storage, "shown")

    keys = ["shown-metrics", "shown-run", "shown-classes", "shown-model-card"]
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate({"key": {"any_": keys}}))
    data = {artifact.key: str(artifact.data) for artifact in found}
    assert data.keys() == set(keys)
    assert json.loads(data["shown-classes"]) == [{"class": "ant", "recall": 1.0}, {"class": "bee", "recall": 0.5}]
    assert data["shown-model-card"].startswith(card)
    assert base64.b64encode(small).decode() in data["shown-model-card"]
    assert base64.b64encode(large[:90]).decode() not in data["shown-model-card"]
    gallery = re.search(r"!\[test_mistakes.png\]\(data:image/jpeg;base64,([^)]+)\)", data["shown-model-card"])
    assert gallery is not None
    content = base64.b64decode(gallery[1])
    assert len(small) + len(content) <= MAX_PICTURE_BYTES
    with Image.open(io.BytesIO(content)) as rendition:
        assert rendition.format == "JPEG"
    assert f"/runs/{run.run_id}?workflowType=machine_learning)" in data["shown-model-card"]


def test_predictions_to_look_at_are_shown_and_names_from_outside_are_no_markup():
    """A file name or a label is text in a table that the UI renders as Markdown."""
    report = PredictReport(
        predictions=TableRef(path="/tables/predictions", version=2),
        model=ModelRef(name="photos", version=3, run_id="run"),
        predicted=2,
        errors=1,
        seconds=1.0,
        least_sure=(
            PredictedImage(path="cat/[x](javascript:1).png", label=None, probability=None, error="not_an_image: <b>"),
            PredictedImage(path="dog/2.png", label="![](http://a)", probability=0.51234, error=None),
        ),
    )
    state = flow(lambda: publish_predictions(report), name="predictions")(return_state=True)
    with get_client(sync_client=True) as client:
        wanted = {"flow_run_id": {"any_": [state.state_details.flow_run_id]}}
        (artifact,) = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    assert artifact.key == "predictions"
    assert "photos version 3, errors first; all are in `/tables/predictions` version 2" in artifact.description
    assert json.loads(artifact.data) == [
        {
            "path": r"cat/\[x\](javascript:1).png",
            "label": "",
            "probability": "",
            "error": r"not_an_image: \<b\>",
        },
        {"path": "dog/2.png", "label": r"!\[\](http://a)", "probability": "0.5123", "error": ""},
    ]
