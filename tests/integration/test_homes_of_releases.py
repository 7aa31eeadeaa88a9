"""Homes of earlier releases: nothing is built, trained or renamed again, and predicted labels stay the same."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import mlflow
import numpy as np
import pytest
from deltalake import DeltaTable
from PIL import Image

from tasks.cache.manifest import open_cache
from tasks.cache.materialize import materialize_cache
from tasks.config.etl import EtlConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_images
from tasks.model_package.decode import decode_image
from tasks.model_package.description import AS_BEFORE
from tasks.predict.evaluation import load_registered
from tasks.refs import ModelRef, RunRef
from tasks.registry.promote import promote_best
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tasks.tune.search import TrialThread, search_parameters
from tests.builders import release_home
from tests.builders.image_bytes import deep_png, encoded
from tests.builders.release_home import CACHE, CLASSES, FINISHED, FOLDER, INTERRUPTED, SEARCH, TRIALS, rows, storage_of
from tests.builders.streams import stream
from tests.builders.untrained_model import predict
from tests.fakes.interrupted_training import CountingRank


def test_copied_home_of_an_earlier_release_goes_on_as_it_is(spark, tmp_path):
    """Nothing is built, trained or renamed again; tests/faults has the home where it was made."""
    with release_home.source_at_its_place():
        check_home(Path(shutil.copytree(FOLDER / "home", tmp_path / "another-home")))


def check_home(home: Path) -> None:
    """Check that tables, cache, runs, champion, predictions, streams and search are found; new images are added.

    Args:
        home: The home, whose source is at its place.
    """
    source = str(FOLDER / "source")
    original = {file: file.read_bytes() for file in (FOLDER / "home").rglob("*") if file.is_file()}
    storage, facts = storage_of(home), json.loads((FOLDER / "facts.json").read_text())
    champion, finished = ModelRef(**facts["champion"]), RunRef(run_id=facts["finished"])

    # Tables and cache: nothing is read, stored or built.
    report = ingest_images(EtlConfig(source=source), storage, SparkConfig())
    assert (report.changed, report.read, report.images.version) == (False, 0, facts["images"]["version"])
    assert (report.stored, report.duplicates, report.quarantined) == (37, 1, 3)
    assert rows(storage.table("files"), "path", "outcome", "reason") == facts["files"]
    cache, is_built = materialize_cache(CACHE, report.images, storage, SparkConfig())
    assert (is_built, cache.digest, Path(cache.url).name) == (
        False,
        facts["cache"]["digest"],
        Path(facts["cache"]["url"]).name,
    )

    # Runs: the finished one is found, and the interrupted one resumes after the epochs that it had.
    rank = CountingRank()
    spec = TrainingSpec(train=FINISHED, cache=cache, storage=storage)
    assert train_model(spec, reducer=rank, on_epoch=rank.on_epoch) == finished
    assert (rank.steps, rank.epochs) == (0, [])
    spec = TrainingSpec(train=INTERRUPTED, cache=cache, storage=storage)
    assert train_model(spec, reducer=rank, on_epoch=rank.on_epoch).run_id == facts["interrupted"]
    assert rank.epochs == list(range(release_home.INTERRUPTED_EPOCHS, INTERRUPTED.max_epochs))
    search = search_parameters(TRIALS, SEARCH, cache, storage, partial(TrialThread, num_slots=1), {})
    assert (search.run_id, search.best.learning_rate) == (facts["search"], facts["best"])
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert {run.info.run_id: run.info.status for run in runs} == facts["runs"] | {facts["interrupted"]: "FINISHED"}

    # The champion, and what it predicted.
    assert promote_best([finished], PromoteConfig(), storage).champion == champion
    versions = [f"{one.name} {one.version} {one.run_id}" for one in client.search_model_versions()]
    assert versions == facts["models"]
    assert predict(storage).predicted == 0
    assert stream(storage, champion.name, predictions=f"{storage.tables}/stream/predictions").batches == 0
    of_folder = {"predictions": f"{storage.tables}/folder/predictions", "source": source}
    assert stream(storage, champion.name, **of_folder).batches == 0
    assert DeltaTable(storage.table("predictions")).version() == facts["versions"]["predictions"]
    again = f"{storage.tables}/again/predictions"
    assert predict(storage, champion.name, table=storage.table("images"), predictions=again).predicted == 37
    assert rows(again, "sha256", "label") == facts["labels"]
    assert {row["unknown_score"] for row in rows(again, "unknown_score")} == {None}

    # New images of the classes are images of these classes.
    for label, colour in CLASSES.items():
        Image.new("RGB", (24, 24), colour).save(FOLDER / "source" / label / "new.png")
    # Samples of 12 bits in 16, which new tables refuse, are decoded as that release did.
    deep = deep_png(np.random.default_rng(5).integers(0, 4096, (24, 24, 3)))
    (FOLDER / "source" / "red" / "deep.png").write_bytes(deep)
    report = ingest_images(EtlConfig(source=source), storage, SparkConfig())
    assert (report.read, report.stored, sorted(report.classes)) == (4, 41, sorted(CLASSES))
    assert stream(storage, champion.name, predictions=f"{storage.tables}/stream/predictions").predicted == 4
    assert stream(storage, champion.name, **of_folder).predicted == 4
    assert predict(storage).predicted == 4
    model = load_registered(champion, storage)
    assert (model.decoding, open_cache(cache).decoding) == (AS_BEFORE, AS_BEFORE)
    (expected,) = model.predict([encoded(decode_image(deep, decoding=AS_BEFORE))])
    for name in ("predictions", "stream/predictions", "folder/predictions"):
        columns = ("sha256", "probability", "error", "unknown_score")
        found = {row["sha256"]: row for row in rows(f"{storage.tables}/{name}", *columns)}
        assert {row["unknown_score"] for row in found.values()} == {None}, name
        assert found[hashlib.sha256(deep).hexdigest()]["error"] is None, name
        assert found[hashlib.sha256(deep).hexdigest()]["probability"] == pytest.approx(expected.probability, abs=1e-5)
    newer, is_built = materialize_cache(CACHE, report.images, storage, SparkConfig())
    assert (is_built, open_cache(newer).decoding, open_cache(newer).quarantined) == (True, AS_BEFORE, ())
    if home != FOLDER / "home":
        assert {file: file.read_bytes() for file in (FOLDER / "home").rglob("*") if file.is_file()} == original
