"""Training in a single process and in two ranks, and rejected settings."""

import gzip
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache as cache_results
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import torchvision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer
from tasks.config.train import FineTunePhase
from tasks.errors import WrongInput
from tasks.metrics.evaluate import evaluate, evaluate_in_detail
from tasks.model.device import choose_device
from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.description import RATES
from tasks.model_package.serving import serving_network
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.tracking.runs import read_artifact, run_metrics
from tasks.tracking.trained import promotable_runs
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.homes import home_with_tracking
from tests.builders.processes import rank_processes
from tests.builders.training_runs import SMALL, train, train_here, weights
from tests.conftest import write_images

DEVICE = choose_device("auto", 0)
"""Device of a training run in a single process, and of its model."""


@dataclass(frozen=True)
class Finished:
    """A finished training run of SMALL, which no test changes."""

    storage: Storage
    cache: CacheRef
    runs: list[RunRef]
    """The result of each caller."""
    events: list[dict[str, Any]]
    """Events of the only call that trained."""
    seconds: float
    """Duration of all calls together."""

    def test_images(self) -> CacheLoader:
        """Return the loader of the split `test`."""
        return self.images("test")

    def images(self, split: str) -> CacheLoader:
        """Return the loader of a split."""
        return CacheLoader(self.cache.url, open_cache(self.cache), split, 8)

    def classifier(self) -> ImageClassifier:
        """Return the model that was logged."""
        return ImageClassifier.load(next(Path(self.storage.home).rglob("weights.safetensors")).parent)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Callable[[int | None], Finished]:
    """Return a function that trains once per number of ranks; two callers train with two ranks at once."""

    @cache_results
    def make(num_ranks: int | None) -> Finished:
        folder = tmp_path_factory.mktemp(f"finished-{num_ranks}")
        write_images(folder / "source", 20)
        storage = home_with_tracking(folder / "home", empty_tracking)
        images = hand_made_cache(folder / "source", f"{storage.cache}/by-hand")
        events: list[dict[str, Any]] = []
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            wanted = [pool.submit(train, images, storage, num_ranks, events.append) for _ in range(num_ranks or 1)]
            runs = [one.result() for one in wanted]
        return Finished(storage, images, runs, events, time.perf_counter() - began)

    return make


def test_run_logs_metrics_and_model_and_is_not_repeated(finished):
    """The run has metrics and the model that they were measured on; the same inputs again return the run."""
    found = finished(None)
    assert [event["epoch"] for event in found.events] == [1, 2]
    metrics = run_metrics(found.storage, found.runs[0])
    wanted = {"train_loss", "val_loss", "val_accuracy", "test_accuracy", "images_per_second", "learning_rate"}
    assert wanted <= metrics.keys()
    assert [train(found.cache, found.storage)] == found.runs
    classifier = found.classifier()
    assert classifier.classes == ("blue", "green", "red")
    # The logged model has the logged test accuracy.
    again = evaluate(classifier._network, found.test_images(), 3, DEVICE, Reducer())
    assert again.accuracy == pytest.approx(metrics["test_accuracy"])
    assert again.loss == pytest.approx(metrics["test_loss"], rel=1e-5)
    assert (metrics["temperature"], classifier.precision) == (classifier._network.temperature, "float32")
    assert metrics["temperature"] != 1
    assert "precision_mean_difference" not in metrics


@pytest.mark.parametrize(
    ("num_ranks", "name", "source"),
    [
        (None, "squeezenet1_1 24 px, from scratch", "flows.train"),
        pytest.param(
            2, "squeezenet1_1 24 px, 2 ranks, from scratch", "flows.train_distributed", marks=pytest.mark.long
        ),
    ],
)
def test_run_is_described_in_the_list_of_runs(finished, num_ranks, name, source):
    """A run has a name, a source, datasets, and the model card as description."""
    found = finished(num_ranks)
    run = mlflow.MlflowClient(tracking_uri=found.storage.tracking).get_run(found.runs[0].run_id)
    assert run.data.tags["mlflow.source.name"] == source
    assert run.info.run_name.startswith(f"{name}, ")
    assert {"batch_size 8", "max_epochs 2", "seed 3"} <= {*run.info.run_name.split(", ")}
    datasets = {logged.tags[0].value: logged.dataset for logged in run.inputs.dataset_inputs}
    assert {split: json.loads(dataset.profile)["num_rows"] for split, dataset in datasets.items()} == {
        "train": 39,
        "val": 11,
        "test": 10,
    }
    card = read_artifact(found.storage, found.runs[0], "model_card.md")
    assert run.data.tags["mlflow.note.content"] == card.decode()


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_report_of_a_run_agrees_with_its_model(finished, num_ranks):
    """Figures, tables, event file and card are logged; a single process measures the metrics of all ranks."""
    found = finished(num_ranks)
    storage, run = found.storage, found.runs[0]
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    names = {file.path for file in client.list_artifacts(run.run_id)}
    assert {
        "test_confusion.png",
        "test_calibration.png",
        "unknown_scores.png",
        "learning_curves.png",
        "test_classes.json",
        "model_card.md",
    } <= names
    (events,) = client.list_artifacts(run.run_id, "tensorboard")
    assert events.path == f"tensorboard/events.out.tfevents.{run.run_id}"

    network = found.classifier()._network
    alone = evaluate_in_detail(network, found.test_images(), 3, DEVICE, Reducer())
    metrics = run_metrics(storage, run)
    assert metrics["test_calibration_error"] == pytest.approx(alone.calibration.error, abs=1e-4)
    val = evaluate_in_detail(network, found.images("val"), 3, DEVICE, Reducer(), metrics["temperature"]).scores
    assert found.classifier().unknown_thresholds == pytest.approx(val.thresholds(), abs=3e-6)
    test = evaluate_in_detail(network, found.test_images(), 3, DEVICE, Reducer(), metrics["temperature"]).scores
    threshold = found.classifier().unknown_thresholds[RATES.index(0.5)]
    card = read_artifact(storage, run, "model_card.md").decode()
    shares = f"{val.share_above(threshold):.4f} | {test.share_above(threshold):.4f}"
    assert f"| 0.5 | {threshold:.4f} | {shares} |" in card
    plain = evaluate_in_detail(serving_network(network, "float32", 1), found.test_images(), 3, DEVICE, Reducer())
    assert metrics["test_calibration_error_uncalibrated"] == pytest.approx(plain.calibration.error, abs=1e-4)
    assert alone.mistakes, "two epochs are too few for a model without mistakes"
    table = json.loads(read_artifact(storage, run, "test_mistakes.json"))
    mistakes = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [mistake["row"] for mistake in mistakes] == [mistake.row for mistake in alone.mistakes]
    assert [mistake["loss"] for mistake in mistakes] == pytest.approx([m.loss for m in alone.mistakes], rel=1e-3)
    card = read_artifact(storage, run, "model_card.md").decode()
    assert f"| MLflow run | `{run.run_id}` |" in card
    assert f"| calibration error |  | {metrics['test_calibration_error']:.4f} |" in card
    assert ("flows.train_distributed" in card) == (num_ranks is not None)


def test_losses_of_one_rank_equal_those_of_a_single_process(finished, cache, storage):
    """One rank and a single process have bit-identical metrics."""
    found = finished(None)
    alone = run_metrics(found.storage, found.runs[0])
    ranked = run_metrics(storage, train(cache, storage, num_ranks=1))
    for name in ("train_loss", "val_loss", "test_loss", "val_accuracy"):
        assert alone[name] == ranked[name], name


def test_traced_steps_and_histograms_are_artifacts_of_the_run(cache, storage, tmp_path):
    """The steps of rank 0 are recorded in training, with the operations of its network, and its layers per epoch."""
    run = train_here(cache, storage, None, trace_steps=2, histograms=True)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    with gzip.open(client.download_artifacts(run.run_id, "trace/phase-00.json.gz", str(tmp_path))) as file:
        events = json.load(file)["traceEvents"]
    # A GPU's own timeline has each step once more.
    steps = [event for event in events if event.get("cat") == "user_annotation" and "Adam.step" in event["name"]]
    assert len(steps) == 2
    assert "aten::convolution" in [event.get("name") for event in events]
    folder = client.download_artifacts(run.run_id, "tensorboard", str(tmp_path))
    shown = EventAccumulator(folder, {"histograms": 0}).Reload()  # all of them
    epochs = [event.step for event in shown.Scalars("loss/train")]
    tags = shown.Tags()["histograms"]
    assert {"activations/network.features.0", "gradient_norms/network.features.0"} <= set(tags)
    for tag in tags:
        assert [event.step for event in shown.Histograms(tag)] == epochs


def test_two_ranks_count_every_image_once(finished):
    """Two ranks with unequal shards (5 and 5 row groups, one padded) log averaged metrics to one MLflow run."""
    found = finished(2)
    storage = found.storage
    assert [event["epoch"] for event in found.events] == [1, 2]
    metrics = run_metrics(storage, found.runs[0])
    network = found.classifier()._network
    alone = evaluate(network, found.test_images(), 3, DEVICE, Reducer())
    assert int(alone.confusion_KK.sum()) == 10
    assert metrics["test_accuracy"] == pytest.approx(alone.accuracy)
    assert metrics["test_loss"] == pytest.approx(alone.loss, rel=1e-4)
    assert metrics["learning_rate"] == pytest.approx(math.sqrt(2) * SMALL.learning_rate)
    assert rank_processes(storage.home) == []


def test_two_concurrent_calls_with_the_same_inputs_train_once(finished):
    """The second call waits for the first, so that none of its ranks waits until Horovod times out."""
    found = finished(2)
    assert len(found.runs) == 2
    assert found.runs[0] == found.runs[1]
    assert len(promotable_runs(found.storage)) == 1


def test_ranks_that_accumulate_train_like_one_process_with_large_batches(cache, storage, tmp_path):
    """Horovod averages the gradients of two batches of two ranks to those of a single batch, up to rounding."""
    path = tmp_path / "weights.pth"
    torch.save(torchvision.models.get_model("shufflenet_v2_x0_5", weights=None).state_dict(), path)
    settings = {"model": "shufflenet_v2_x0_5", "weights": str(path), "freeze_backbone": True, "optimizer": "sgd"}
    settings |= {"reference_batch_size": 16, "learning_rate": 0.05, "precision": "fp32"}
    runs = [
        train_here(cache, storage, None, batch_size=16, **settings),
        train(cache, storage, 2, batch_size=4, accumulate_steps=2, **settings),
    ]

    alone, ranks = (run_metrics(storage, run) for run in runs)
    for name in ("train_loss", "val_loss", "test_loss", "gradient_norm"):
        assert ranks[name] == pytest.approx(alone[name], rel=1e-4), name
    first, second = (weights(run, storage, tmp_path) for run in runs)
    assert not torch.equal(first["network.fc.weight"], torch.zeros_like(first["network.fc.weight"]))
    assert torch.allclose(first["network.fc.weight"], second["network.fc.weight"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_phases_unfreeze_one_after_the_other(cache, storage, test_data, tmp_path, num_ranks):
    """The head trains first, then the last blocks with their own learning rate, from the best weights so far."""
    path = test_data / "weights" / "mobilenet_v2.pth"
    run = train_here(
        cache,
        storage,
        num_ranks,
        model="mobilenet_v2",
        weights=str(path),
        freeze_backbone=True,
        # The head hardly learns, so that the best weights, which are logged, are of the second phase.
        learning_rate=1e-5,
        monitor="val_loss",
        max_epochs=3,
        patience=3,
        fine_tune=[FineTunePhase(unfreeze_from="features.17", learning_rate=1e-3, max_epochs=2)],
    )
    metrics = run_metrics(storage, run)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2, 3, 4]
    rates = [metric.value for metric in client.get_metric_history(run.run_id, "learning_rate")]
    # Two ranks warm up to the rate for twice the images, in each phase.
    assert rates[2] == pytest.approx(1e-5 * math.sqrt(num_ranks or 1))
    assert rates[3:] == pytest.approx([rate * 100 for rate in rates[:2]])
    assert metrics["best_epoch"] >= 3
    original, trained = torch.load(path, weights_only=True), weights(run, storage, tmp_path)
    moved = {
        name
        for name in original
        if not name.startswith("classifier") and not torch.equal(trained[f"network.{name}"], original[name])
    }
    assert moved == {name for name in original if name.startswith(("features.17.", "features.18."))}


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_diverged_run_names_step_layer_and_images(cache, storage, num_ranks):
    """The run fails at once with a user error, which is not retried; without a table, images are named by row."""
    message = r"loss of epoch 0, step \d+ is nan.* comes from the layer 'network\..*: lower train.learning_rate.*"
    if num_ranks is None and DEVICE.type == "cuda":
        message = r"gradients of epoch 0, step \d+ .*non-finite.*: lower train.learning_rate.*"  # Checked less often.
    with pytest.raises(WrongInput, match=message + r"its images: rows \d+, .* of the split 'train' in the cache"):
        train_here(cache, storage, num_ranks, learning_rate=10.0, optimizer="sgd", max_epochs=20)


def test_user_error_in_a_rank_reaches_the_caller(cache, storage):
    """A user error in the process of a rank is raised by the launcher with its message."""
    with pytest.raises(WrongInput, match="train.model is 'resnet19', which is not a torchvision classifier"):
        train(cache, storage, model="resnet19")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "/nowhere/weights.pth"}, "train.weights is '/nowhere/weights.pth', which is not a file"),
        ({"monitor": "val_top5_accuracy"}, "train.monitor is 'val_top5_accuracy', which is 1 in every epoch"),
        ({"device": "cuda"}, "train.device is 'cuda' and torch sees no GPU"),
    ],
)
def test_wrong_settings_are_user_errors(cache, storage, settings, message):
    """The error has the setting, its value and the reason."""
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(WrongInput, match=message):
        train_here(cache, storage, None, **settings)


def test_frozen_backbone_with_pretrained_weights_trains_the_head_alone(cache, storage, test_data, tmp_path):
    """Features are cached, and the weights of the backbone do not change."""
    path = test_data / "weights" / "mobilenet_v2.pth"
    run = train_here(
        cache, storage, None, model="mobilenet_v2", weights=str(path), freeze_backbone=True, max_epochs=40, patience=40
    )
    trained = weights(run, storage, tmp_path)
    original = torch.load(path, weights_only=True)
    backbone = [name for name in original if name.startswith("features.")]
    assert all(torch.equal(trained[f"network.{name}"], original[name]) for name in backbone)
    assert run_metrics(storage, run)["best_val_accuracy"] > 0.9


def test_run_logs_the_share_of_time_that_it_waited_for_data(finished):
    """The share is between 0 and 1, and the throughput is that of the training steps."""
    found = finished(None)
    metrics = run_metrics(found.storage, found.runs[0])
    assert 0.0 <= metrics["data_wait_share"] <= 1.0
    assert metrics["images_per_second"] > 39 / found.seconds
