"""Training runs that start from a model: the champion or a run is fetched once, checked, and named by its file."""

import os
import shutil
import time
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tasks.cache.manifest import open_cache
from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.launch.initial_weights import fetch_initial_weights
from tasks.model_package.description import WEIGHTS_FILE, read_description
from tasks.refs import CacheRef, RunRef, TableRef
from tasks.storage import Storage
from tasks.tables.properties import SOURCE_PROPERTY
from tasks.tracking.models import derived_model_name, register_run, set_alias
from tests.builders.caches import noise, write_cache
from tests.builders.training_runs import SMALL, train_here
from tests.builders.untrained_model import CLASSES, log_run

CHAMPION = TrainConfig(model="squeezenet1_1", weights="champion")


def make_champion(storage: Storage, run: RunRef, name: str = "photos") -> None:
    """Register a run as the champion of a model."""
    set_alias(storage, register_run(storage, run, name), "champion")


def fetched(train: TrainConfig, storage: Storage, **given) -> Path:
    """Return the file with the initial weights."""
    return Path(fetch_initial_weights(train, storage, SparkConfig(), **given).weights)


def test_champion_and_run_become_a_file(storage, tmp_path):
    """The files are in the home under the id of their run, fetched once; unused ones are removed."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.6)
    make_champion(storage, run)
    file = fetched(CHAMPION, storage, model_name="photos")

    assert file == Path(storage.home) / "weights" / run.run_id / WEIGHTS_FILE
    assert file.read_bytes() == (tmp_path / "classifier-1" / WEIGHTS_FILE).read_bytes()
    assert read_description(file.parent).classes == CLASSES
    before, old = file.stat(), file.parent.with_name("f" * 32)
    shutil.copytree(file.parent, old)
    for folder in (old, file.parent):
        os.utime(folder, (0, 0))
    by_run = CHAMPION.model_copy(update={"weights": run.run_id})
    assert fetched(by_run, storage) == file
    assert (file.stat().st_ino, file.stat().st_mtime) == (before.st_ino, before.st_mtime)
    assert not old.exists()
    assert time.time() - file.parent.stat().st_mtime < 3600
    shutil.rmtree(file.parent)
    assert fetched(by_run, storage).read_bytes() == (tmp_path / "classifier-1" / WEIGHTS_FILE).read_bytes()
    assert time.time() - file.parent.stat().st_mtime < 3600
    plain = TrainConfig(weights="DEFAULT")
    assert fetch_initial_weights(plain, storage, SparkConfig()) is plain


def test_champion_is_that_of_the_table(storage, tmp_path):
    """Without the name of a model, it is the model of the table `images`."""
    with pytest.raises(
        WrongInput, match="train.weights is 'champion', and the table '.*images' has no champion: train"
    ):
        fetched(CHAMPION, storage)
    path = storage.table("images")
    deltalake.write_deltalake(path, pa.table({"sha256": ["a"]}))
    [log] = Path(path, "_delta_log").glob("*.json")  # delta-rs writes no properties but its own.
    log.write_text(
        log.read_text().replace('"configuration":{', f'"configuration":{{"{SOURCE_PROPERTY}":"/data/photos"')
    )
    table = TableRef(
        path=path, version=0, table_id=str(deltalake.DeltaTable(path).metadata().id), source="/data/photos"
    )
    name = derived_model_name(table, storage)
    with pytest.raises(WrongInput, match=f"and the registered model '{name}' has no champion: train with DEFAULT"):
        fetched(CHAMPION, storage)
    run = log_run(storage, tmp_path, seed=2, accuracy=0.6)
    make_champion(storage, run, name)
    assert fetched(CHAMPION, storage).parent.name == run.run_id


def test_what_is_no_model_of_this_project_is_refused(storage, tmp_path):
    """An unknown run, and a champion whose files were changed since its registration, are refused."""
    with pytest.raises(
        WrongInput, match="train.weights is the id of an MLflow run without a model .*: give a finished"
    ):
        fetched(CHAMPION.model_copy(update={"weights": "0" * 32}), storage)
    run = log_run(storage, tmp_path, seed=3, accuracy=0.6)
    make_champion(storage, run)
    [stored] = Path(storage.home).rglob(f"artifacts/**/{WEIGHTS_FILE}")
    stored.write_bytes(stored.read_bytes()[:-1] + b"\0")
    with pytest.raises(WrongInput, match=r"has a file weights.safetensors with the sha256"):
        fetched(CHAMPION, storage, model_name="photos")
    assert not list((Path(storage.home) / "weights").iterdir())


def test_new_data_starts_from_the_champion(storage: Storage, cache: CacheRef, tmp_path: Path) -> None:
    """On another cache, training starts from the champion; on its own, from the model that it started from."""
    first = train_here(cache, storage, None, max_epochs=1)
    make_champion(storage, first)
    named = SMALL.model_copy(update={"weights": "champion", "max_epochs": 1, "freeze_backbone": True})
    classes = ("blue", "red", "white")
    grown = write_cache(
        str(tmp_path / "grown"),
        {"train": 12, "val": 6, "test": 6},
        lambda _split, row: (noise(row, 24), row % 3),
        classes,
        open_cache(cache).settings,
        rows_per_group=4,
        groups_per_file=2,
    )
    again = fetch_initial_weights(named, storage, SparkConfig(), "photos", cache)
    start = fetch_initial_weights(named, storage, SparkConfig(), "photos", grown)
    assert again.weights == start.weights, "the champion itself started from no model"
    second = train_here(grown, storage, None, weights=start.weights, freeze_backbone=True, max_epochs=1)
    make_champion(storage, second)
    third = fetch_initial_weights(named, storage, SparkConfig(), "photos", grown)
    other = fetch_initial_weights(named, storage, SparkConfig(), "photos", cache)
    assert Path(other.weights).parent.name == second.run_id, "the champion of other data"

    assert third.weights == start.weights, "the champion of the same data: its finished run is found again"
    assert train_here(grown, storage, None, weights=third.weights, freeze_backbone=True, max_epochs=1) == second
    file = fetched(named.model_copy(update={"weights": second.run_id}), storage)
    trained, before = load_file(file), load_file(start.weights)
    assert read_description(file.parent).classes == classes
    assert all(
        torch.equal(value, before[name]) for name, value in trained.items() if not name.startswith("network.classifier")
    ), "the backbone was frozen"
