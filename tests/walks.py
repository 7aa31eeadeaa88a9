"""The walks of a reader through the code (tests/builders/walk.py): files entered, and returns to them.

    .venv/bin/python -m tests.walks                # the numbers
    .venv/bin/python -m tests.walks --steps        # and each function

One image is predicted: `predict_batch` on the driver, for a table with one new image, then the function of a worker
for its bytes. The walk is counted in the packages of inference, and in all files. The learning rate is set:
`train_model`, up to the first step (tests/builders/rate_walk.py).
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from pyspark import SparkFiles

from tasks.config.etl import EtlConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.etl.ingest import ingest_images
from tasks.predict.batch import predict_batch
from tasks.predict.scoring import make_predictor
from tasks.registry import aliases
from tasks.registry.promote import promote_best
from tasks.spark.session import keep_spark
from tasks.storage import Storage, resolve_storage
from tests.builders.rate_walk import walk_of_rate
from tests.builders.trials import predict_here
from tests.builders.untrained_model import log_run
from tests.builders.walk import Walk, walk
from tests.conftest import write_images

INFERENCE = ("tasks/predict", "tasks/model_package")

FOR_PEOPLE = tuple(f"tasks/predict/{name}.py" for name in ("answers", "results", "thumbnails"))
"""Files of the results for people, which a run writes after its predictions; one reads them for themselves."""


def walk_of_prediction(storage: Storage, folder: Path) -> Walk:
    """Return the walk of one image through inference.

    Args:
        storage: Storage in a home without tables, in an open Spark session.
        folder: Folder for the images and the model.
    """
    source = folder / "images"
    write_images(source, 2)
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    promote_best([log_run(storage, folder, seed=1, accuracy=0.5)], PromoteConfig(), storage)
    predict_batch(PredictConfig(), PromoteConfig(), storage, SparkConfig())
    write_images(folder / "new", 1, first=2)
    new = source / "red" / "new.png"
    (folder / "new" / "red" / "002.png").rename(new)
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    predict, promote = PredictConfig(), PromoteConfig()

    def predict_one_image() -> None:
        assert predict_batch(predict, promote, storage, SparkConfig()).predicted == 1
        packages = Path(SparkFiles.getRootDirectory()).glob("model-*")
        newest = max(packages, key=lambda package: package.stat().st_mtime_ns)
        (on_worker,) = make_predictor(newest.name, predict, 1).func(iter([pd.Series([new.read_bytes()])]))
        assert on_worker["error"].tolist() == [None]

    return walk(predict_one_image).without(*FOR_PEOPLE)


@contextmanager
def _storage() -> Iterator[tuple[Storage, Path]]:
    with tempfile.TemporaryDirectory() as folder, keep_spark():
        aliases.predict_once = predict_here
        yield resolve_storage(StorageConfig(home=f"{folder}/home")), Path(folder)


def main(arguments: Sequence[str]) -> None:
    """Print the walks."""
    with _storage() as (storage, folder):
        found, of_rate = walk_of_prediction(storage, folder), walk_of_rate(storage)
    if "--steps" in arguments:
        for each in (found.within(*INFERENCE), of_rate):
            print(*(" ".join(step) for step in each.steps), "", sep="\n")
    print(f"one image is predicted, in {' and '.join(INFERENCE)}: {found.within(*INFERENCE)}")
    print(f"one image is predicted, in all files: {found}")
    print(f"the learning rate is set: {of_rate}")


if __name__ == "__main__":
    main(sys.argv[1:])
