"""A home with everything that runs leave, made by one release for the tests of the later ones: release_home.py ARCHIVE.

The folder is a fixed one, as tables and MLflow record absolute paths of the source and of the home.
"""

import json
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import filelock
import mlflow
import numpy as np
import torch
import torchvision
from deltalake import DeltaTable
from PIL import Image

from tasks.cache.materialize import materialize_cache
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import Range, TuneConfig
from tasks.etl.ingest import ingest_images
from tasks.predict.batch import predict_batch
from tasks.refs import CacheRef
from tasks.registry.promote import promote_best
from tasks.spark.session import keep_spark
from tasks.storage import Storage, resolve_storage
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tasks.tune.search import TrialThread, search_parameters
from tests.builders.delta_rows import delta_rows
from tests.builders.streams import stream
from tests.fakes.interrupted_training import CountingRank, Interruption, sigterm_interrupts

FOLDER = Path("/tmp/lakevision-homes/2026-11")
"""Folder of source, weights and home when the release made them."""

ARCHIVE = Path(__file__).parent / "homes" / "2026-11.tar.xz"

NETWORK, SIDE = "shufflenet_v2_x0_5", 16
CLASSES = {"red": (200, 40, 40), "green": (40, 200, 40), "Cafe\u0301": (40, 40, 200)}
"""Classes and their colours; one name is decomposed, as some file systems spell it."""

PER_CLASS = 12
MODIFIED_AT = 1_790_000_000
"""Time of all files of the source, in whole seconds: an archive keeps no finer one exactly."""

CACHE = CacheConfig(image_size=SIDE)
TRAIN = {
    "model": NETWORK,
    "weights": str(FOLDER / "weights.pt"),
    "batch_size": 8,
    "max_epochs": 8,
    "patience": 8,
    "learning_rate": 1e-2,
    "num_threads": 1,
    "precision": "fp32",
    "device": "cpu",
    # Releases without recipes trained as the settings say.
    **({"recipe": "given"} if "recipe" in TrainConfig.model_fields else {}),
}
FINISHED = TrainConfig.model_validate(TRAIN)
INTERRUPTED = TrainConfig.model_validate(TRAIN | {"learning_rate": 2e-3})
INTERRUPTED_EPOCHS = 2
"""Epochs that the interrupted run has completed."""

SEARCH = TuneConfig(search={"learning_rate": Range(low=1e-3, high=1e-2, log=True)}, num_trials=2, min_epochs=2)
TRIALS = TrainConfig.model_validate(TRAIN)


def storage_of(home: Path) -> Storage:
    """Return the storage of a home, whatever the environment has."""
    return resolve_storage(StorageConfig(home=str(home), tracking=f"sqlite:///{home}/mlflow.db"))


def write_source(folder: Path) -> None:
    """Write class folders with a large image, a copy of an image, a damaged file, and a content with two labels."""
    for label, colour in CLASSES.items():
        (folder / label).mkdir(parents=True)
        for number in range(PER_CLASS):
            noise = np.random.default_rng((number, *colour)).integers(-30, 30, (SIDE, SIDE, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number:03d}.png")
    Image.new("RGB", (1040, 30), CLASSES["red"]).save(folder / "red" / "large.png")
    shutil.copy(folder / "red" / "000.png", folder / "red" / "copy.png")
    (folder / "green" / "damaged.jpg").write_bytes(b"\xff\xd8 no image")
    for label in ("red", "green"):
        Image.new("RGB", (20, 20), (120, 120, 40)).save(folder / label / "both.png")
    for path in folder.rglob("*.*"):
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))


def write_weights(path: Path) -> None:
    """Write weights of two values per layer, which an archive packs to a bit each."""
    torch.manual_seed(11)
    network = torchvision.models.get_model(NETWORK, weights=None)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "fc" in name:
                weight.zero_()  # the head is replaced
            elif weight.dim() > 1:
                weight.copy_(weight.sign() * weight.std())
        for _ in range(40):  # the statistics of batch norm, on noise over flat colours as in the source
            network(2 * torch.randn(16, 3, 1, 1) + 0.3 * torch.randn(16, 3, SIDE, SIDE))
    torch.save(network.state_dict(), path)


@contextmanager
def source_at_its_place(archive: Path = ARCHIVE) -> Iterator[None]:
    """Unpack source and weights where the release had them, and keep other test runs away from them."""
    FOLDER.parent.mkdir(exist_ok=True)
    with filelock.FileLock(f"{FOLDER}.lock"):
        shutil.rmtree(FOLDER, ignore_errors=True)
        with tarfile.open(archive) as packed:
            packed.extractall(FOLDER, filter="tar")
        try:
            yield
        finally:
            shutil.rmtree(FOLDER)


def rows(path: str, *columns: str) -> list[dict[str, object]]:
    """Return rows of a table in the order of their values, read without this project's code."""
    return sorted(delta_rows(DeltaTable(path), *columns).to_pylist(), key=repr)


def _facts(storage: Storage) -> dict[str, object]:
    """Return what later releases must find as it is."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return {
        "runs": {run.info.run_id: run.info.status for run in runs},
        "models": [f"{one.name} {one.version} {one.run_id}" for one in client.search_model_versions()],
        "versions": {name: DeltaTable(storage.table(name)).version() for name in ("images", "files", "predictions")},
        "files": rows(storage.table("files"), "path", "outcome", "reason"),
        "labels": rows(storage.table("predictions"), "sha256", "label"),
    }


def make_home(folder: Path) -> None:
    """Make source, weights and home in a folder, and write `facts.json` beside them."""
    source, storage, spark = folder / "source", storage_of(folder / "home"), SparkConfig(driver_memory="1g")
    write_source(source)
    write_weights(folder / "weights.pt")
    with keep_spark():
        images = ingest_images(EtlConfig(source=str(source)), storage, spark).images
        cache, _built = materialize_cache(CACHE, images, storage, spark)
        finished = train_model(TrainingSpec(train=FINISHED, cache=cache, storage=storage))
        interrupted = _interrupt(cache, storage)
        champion = promote_best([finished], PromoteConfig(), storage).champion
        predict_batch(PredictConfig(batch_size=8), PromoteConfig(), storage, spark)
        # Streams with state of their own: the table's, and that of a folder.
        stream(storage, champion.name, predictions=f"{storage.tables}/stream/predictions")
        stream(storage, champion.name, predictions=f"{storage.tables}/folder/predictions", source=str(source))
    search = search_parameters(TRIALS, SEARCH, cache, storage, partial(TrialThread, num_slots=1), {})
    facts = {
        "images": images.model_dump(),
        "cache": cache.model_dump(),
        "finished": finished.run_id,
        "interrupted": interrupted,
        "champion": champion.model_dump(),
        "search": search.run_id,
        "best": search.best.learning_rate,
    }
    (folder / "facts.json").write_text(json.dumps(facts | _facts(storage), indent=1, sort_keys=True))


def _interrupt(cache: CacheRef, storage: Storage) -> str:
    """Train until SIGTERM after some epochs, and return the id of the MLflow run."""
    steps_per_epoch = 4
    rank = CountingRank(Interruption("terminated", INTERRUPTED_EPOCHS * steps_per_epoch + 1, (0, 0, 0)))
    try:
        with sigterm_interrupts():
            train_model(
                TrainingSpec(train=INTERRUPTED, cache=cache, storage=storage), reducer=rank, on_epoch=rank.on_epoch
            )
    except KeyboardInterrupt:
        client = mlflow.MlflowClient(tracking_uri=storage.tracking)
        runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
        return str(next(run.info.run_id for run in runs if run.info.status == "KILLED"))
    raise AssertionError(f"{signal.SIGTERM.name} did not interrupt the run")


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    make_home(FOLDER)
    shutil.rmtree(FOLDER / "home" / "logs", ignore_errors=True)
    with tarfile.open(sys.argv[1], "w:xz", format=tarfile.PAX_FORMAT, preset=9) as packed:
        for path in sorted(FOLDER.iterdir()):
            packed.add(path, path.name)
