"""The function of inference in a fresh worker of Spark, as an executor starts it."""

from pathlib import Path

import torch
from pyspark.accumulators import Accumulator
from pyspark.cloudpickle import dumps

from tasks.config.prediction import PredictConfig
from tasks.model.network import build_classifier
from tasks.model_package.classifier import save_classifier
from tasks.predict.predictor import make_predictor
from tasks.spark.progress import EndedTasks
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
    function = make_predictor("package", PredictConfig(), torch.get_num_threads(), ended)
    (tmp_path / "function").write_bytes(dumps(function.func))  # type: ignore[attr-defined]  # of a UDF

    loaded = loaded_modules(IN_WORKER, tmp_path, str(tmp_path))

    assert "tasks.model_package.decode" in loaded
    assert len(loaded) <= MOST_MODULES, loaded
