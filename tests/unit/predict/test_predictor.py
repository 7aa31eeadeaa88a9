"""The function of inference in a fresh worker of Spark, as an executor starts it."""

import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from pyspark import TaskContext
from pyspark.accumulators import Accumulator
from pyspark.cloudpickle import dumps
from pyspark.resource import ResourceInformation

from tasks.config.prediction import PredictConfig
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import ImageClassifier, save_classifier
from tasks.predict.predictor import predict_batches, task_gpu
from tasks.predict.scoring import make_predictor
from tasks.spark.worker_log import EndedTasks, WorkerCount
from tests.builders.loaded_modules import loaded_modules
from tests.builders.small_network import SMALL
from tests.conftest import write_images

MOST_MODULES = 15

IN_WORKER = """
import sys
from pathlib import Path
import pandas as pd
from pyspark import SparkFiles
from pyspark.cloudpickle import loads
folder = Path(sys.argv[1])
SparkFiles._root_directory, SparkFiles._is_running_on_worker = str(folder), True
(batch,) = loads((folder / "function").read_bytes())(iter([pd.Series([(folder / "red" / "000.png").read_bytes()])]))
assert batch["error"].tolist() == [None]
"""


def test_worker_of_inference_loads_few_modules(tmp_path: Path) -> None:
    """A worker that predicts an image loads the function and what decodes and computes, and nothing of the driver."""
    state = build_classifier(SMALL, "none", 3, freeze_backbone=False).state_dict()
    save_classifier(tmp_path / "package", SMALL, state, ("blue", "green", "red"), 32)
    write_images(tmp_path, 1)
    ended = Accumulator(0, (), EndedTasks())
    function = make_predictor("package", PredictConfig(), 1, ended)
    (tmp_path / "function").write_bytes(dumps(function.func))  # type: ignore[attr-defined]  # of a UDF

    loaded = loaded_modules(IN_WORKER, tmp_path, str(tmp_path))

    assert "tasks.model_package.decode" in loaded.own
    assert len(loaded.own) <= MOST_MODULES, loaded.own


@pytest.mark.parametrize(
    ("addresses", "num_gpus", "gpu"),
    [(["1"], 4, 1), (["6", "7"], 2, 0), (["GPU-8932f937"], 2, 0), (None, 4, 2)],
    ids=["own", "renumbered", "named", "shared"],
)
def test_task_has_the_gpu_that_spark_assigned(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str] | None, num_gpus: int, gpu: int
) -> None:
    """A cluster may renumber an executor's GPUs or name them; without assignment, tasks take one after the other."""
    monkeypatch.setattr(TaskContext, "_taskContext", None)  # restored afterwards: a new object is the current one
    task = TaskContext()
    monkeypatch.setattr(task, "_partitionId", 6)
    monkeypatch.setattr(task, "_resources", {} if addresses is None else {"gpu": ResourceInformation("gpu", addresses)})

    assert task_gpu(num_gpus) == gpu


@pytest.mark.parametrize(("is_available", "expected"), [(True, "cuda:0"), (False, "cpu")])
def test_gpus_of_a_broken_driver_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_available: bool, expected: str
) -> None:
    """The driver counts them, and torch cannot use them: the worker predicts on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    state = build_classifier(SMALL, "none", 3, freeze_backbone=False).state_dict()
    save_classifier(tmp_path, SMALL, state, ("blue", "green", "red"), 32)
    devices = []

    def load(_package: str, device: str) -> ImageClassifier:
        devices.append(device)
        return ImageClassifier.load(tmp_path, torch.device("cpu"))

    monkeypatch.setattr("tasks.predict.predictor.load_once", load)
    batches = iter([pd.Series([b"no image"])])
    (found,) = predict_batches(batches, "package", 8, (1, 0.0, 0.0), 1, WorkerCount("predict", os.getpid(), None))

    assert devices == [expected]
    assert found["error"].notna().all()


def test_gpu_outside_of_a_task_is_the_first() -> None:
    """The driver has no task."""
    assert task_gpu(2) == 0
