"""Checks of the disk space for a cache; an existing cache needs none."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import deltalake
import pyarrow as pa
import pytest

from tasks.cache.manifest import read_manifest, write_manifest
from tasks.checks.preflight import check_room
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl.source import Source, prepare_source
from tasks.schema import FILES_ARROW, IMAGES_ARROW
from tasks.storage import Storage, resolve_storage
from tasks.tables import snapshots
from tasks.tables.properties import table_properties
from tests.builders.hand_made_cache import hand_made_cache
from tests.conftest import write_images


class Usage(NamedTuple):
    """Disk usage in bytes, as returned by `shutil.disk_usage`."""

    total: int
    used: int
    free: int


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch `shutil.disk_usage` to report one free byte."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Usage(2, 1, 1))


class FinishedRun(NamedTuple):
    """A finished run: its source, tables, and cache."""

    etl: EtlConfig
    cache: CacheConfig
    storage: Storage
    folder: Path

    def source(self) -> Source:
        """List the source again."""
        return prepare_source(self.etl, self.storage, SparkConfig())


def change_metadata(storage: Storage, name: str, **values: str | Mapping[str, str]) -> None:
    """Change a table's metadata in its first commit: delta-rs does not create tables with properties unknown to it."""
    commit = Path(storage.table(name), "_delta_log", f"{0:020}.json")
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"].update(values)
    commit.write_text("\n".join(map(json.dumps, actions)))


@pytest.fixture
def finished_run(tmp_path: Path) -> FinishedRun:
    """Return source, tables and cache as after a run, made without Spark."""
    folder, storage = tmp_path / "source", resolve_storage(StorageConfig(home=str(tmp_path / "home")))
    write_images(folder, 20)
    etl = EtlConfig(source=str(folder))
    listing = prepare_source(etl, storage, SparkConfig()).listing.table().to_pylist()
    files = [
        {**row, "split": "train", "sha256": row["path"], "outcome": "stored", "seen_at": row["modified_at"]}
        for row in listing
    ]
    images = [{"sha256": row["path"], "label": row["label"], "split": "train", "content": b""} for row in files]
    properties = table_properties(etl, folder)
    for name, rows, schema in (("files", files, FILES_ARROW), ("images", images, IMAGES_ARROW)):
        table = pa.Table.from_pylist(rows, schema=pa.schema(field.with_nullable(True) for field in schema))
        deltalake.write_deltalake(storage.table(name), table)
        change_metadata(storage, name, configuration=properties)
    url = f"{storage.cache}/by-hand"
    hand_made_cache(folder, url)
    manifest = read_manifest(url)
    assert manifest is not None
    write_manifest(url, manifest.model_copy(update={"table": snapshots.latest(None, storage.table("images"))}))
    return FinishedRun(etl, manifest.settings, storage, folder)


def compact(table: Path, version: int = 1) -> None:
    """Commit the table's file under another name without a change of rows, as a compaction does."""
    commit = table / "_delta_log" / f"{0:020}.json"
    (add,) = (action["add"] for line in commit.read_text().splitlines() if "add" in (action := json.loads(line)))
    shutil.copy(table / add["path"], table / "compacted.parquet")
    remove = {"path": add["path"], "deletionTimestamp": add["modificationTime"], "dataChange": False}
    actions = [{"remove": remove}, {"add": {**add, "path": "compacted.parquet", "dataChange": False}}]
    commit.with_name(f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.usefixtures("full_disk")
def test_run_with_an_existing_cache_needs_no_disk_space(finished_run: FinishedRun) -> None:
    """A run with an existing cache is not refused, also after maintenance, whose versions have the same rows."""
    check_room(finished_run.etl, finished_run.cache, finished_run.source(), finished_run.storage)
    before = snapshots.latest(None, finished_run.storage.table("images"))
    compact(Path(before.path))
    assert snapshots.latest(None, before.path).version > before.version
    check_room(finished_run.etl, finished_run.cache, finished_run.source(), finished_run.storage)


@pytest.mark.usefixtures("full_disk")
def test_tables_split_by_content_are_compared_with_their_own_settings(finished_run: FinishedRun) -> None:
    """A run with the default settings continues such tables, so preflight does not refuse it."""
    made_with = table_properties(finished_run.etl.model_copy(update={"split_by": "content"}), finished_run.folder)
    for name in ("images", "files"):
        change_metadata(finished_run.storage, name, configuration=made_with)
    check_room(finished_run.etl, finished_run.cache, finished_run.source(), finished_run.storage)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("how", ["moved", "linked", "linked, without an id"])
def test_cache_of_a_moved_home_is_found(finished_run: FinishedRun, tmp_path: Path, how: str) -> None:
    """A cache is matched by the table's id, or without one by path with symbolic links resolved."""
    home = tmp_path / "elsewhere"
    if how == "moved":
        shutil.move(finished_run.storage.home, home)
    else:
        home.symlink_to(finished_run.storage.home)
    storage = resolve_storage(StorageConfig(home=str(home)))
    if how == "linked, without an id":
        url = f"{storage.cache}/by-hand"
        manifest = read_manifest(url)
        assert manifest is not None
        unnamed = manifest.table.model_copy(update={"table_id": ""})
        write_manifest(url, manifest.model_copy(update={"table": unnamed}))
    check_room(finished_run.etl, finished_run.cache, prepare_source(finished_run.etl, storage, SparkConfig()), storage)


@pytest.mark.usefixtures("full_disk")
def test_cache_of_another_table_at_the_same_path_does_not_count(finished_run: FinishedRun) -> None:
    """A new table at the same path has another id, so its cache must be built."""
    change_metadata(finished_run.storage, "images", id="5c2d8a0e-0000-0000-0000-000000000000")
    with pytest.raises(WrongInput, match="the cache in"):
        check_room(finished_run.etl, finished_run.cache, finished_run.source(), finished_run.storage)


@pytest.mark.usefixtures("full_disk")
def test_tables_that_only_spark_can_read_are_not_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run is not refused, with a log line, since the disk is checked again when a cache is built."""
    caplog.set_level("INFO", "lakevision.preflight")
    source, storage = tmp_path / "source", resolve_storage(StorageConfig(home=str(tmp_path / "fifty per%20cent")))
    write_images(source, 2)
    etl = EtlConfig(source=str(source))
    Path(storage.cache).mkdir(parents=True)
    for name in ("images", "files"):
        deltalake.write_deltalake(tmp_path / name, pa.table({"path": ["a"]}))
        shutil.move(tmp_path / name, storage.table(name))
    check_room(etl, CacheConfig(), prepare_source(etl, storage, SparkConfig()), storage)
    assert "only Spark can read" in "\n".join(caplog.messages)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(
    "change", ["new file", "removed file", "other size", "no cache", "changed rows", "expired log"]
)
def test_run_that_must_write_a_cache_is_refused(finished_run: FinishedRun, change: str) -> None:
    """The space for a whole cache is needed, since it shares no files with a cache of other rows."""
    cache = finished_run.cache
    if change == "new file":
        write_images(finished_run.folder, 1, first=100)
    elif change == "removed file":
        next(finished_run.folder.glob("red/*")).unlink()
    elif change == "other size":
        cache = cache.model_copy(update={"image_size": 2 * cache.image_size})
    elif change == "no cache":
        shutil.rmtree(finished_run.storage.cache)
    else:
        table = deltalake.DeltaTable(finished_run.storage.table("images"))
        deltalake.write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")
        if change == "expired log":
            # The rest of the log does not tell whether rows changed since the cache was built.
            compact(Path(finished_run.storage.table("images")), version=2)
            deltalake.DeltaTable(finished_run.storage.table("images")).create_checkpoint()
            for version in range(2):
                Path(finished_run.storage.table("images"), "_delta_log", f"{version:020}.json").unlink()
    with pytest.raises(WrongInput, match="the cache in '.*' needs .* cache.image_size"):
        check_room(finished_run.etl, cache, finished_run.source(), finished_run.storage)
