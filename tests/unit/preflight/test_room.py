"""A cache that is there already needs no room."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import deltalake
import pyarrow as pa
import pytest

from tasks.cache.manifest import read_manifest, write_manifest
from tasks.config import CacheConfig, EtlConfig, SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl import snapshots
from tasks.etl.settings import table_properties
from tasks.etl.source import Source, prepare_source
from tasks.preflight.room import check_room
from tasks.schema import FILES_ARROW, IMAGES_ARROW
from tasks.storage import Storage, resolve_storage
from tests.conftest import write_pictures
from tests.integration.hand_made import hand_made_cache


class Usage(NamedTuple):
    """As `shutil.disk_usage` returns it."""

    total: int
    used: int
    free: int


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk have one free byte."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Usage(2, 1, 1))


class Night(NamedTuple):
    """A run of yesterday: the source as it is, its tables, and the cache."""

    etl: EtlConfig
    cache: CacheConfig
    storage: Storage
    folder: Path

    def source(self) -> Source:
        """List the source again."""
        return prepare_source(self.etl, self.storage, SparkConfig())


@pytest.fixture
def night(tmp_path: Path) -> Night:
    """Make source, tables and cache as a run leaves them, without Spark."""
    folder, storage = tmp_path / "source", resolve_storage(StorageConfig(home=str(tmp_path / "home")))
    write_pictures(folder, 20)
    etl = EtlConfig(source=str(folder))
    listing = prepare_source(etl, storage, SparkConfig()).listing.to_pylist()
    files = [
        {**row, "split": "train", "sha256": row["path"], "outcome": "stored", "seen_at": row["modified_at"]}
        for row in listing
    ]
    images = [{"sha256": row["path"], "label": row["label"], "split": "train", "content": b""} for row in files]
    properties = table_properties(etl, folder)
    for name, rows, schema in (("files", files, FILES_ARROW), ("images", images, IMAGES_ARROW)):
        table = pa.Table.from_pylist(rows, schema=pa.schema(field.with_nullable(True) for field in schema))
        deltalake.write_deltalake(storage.table(name), table)
        # delta-rs refuses properties that it does not know, of a table that it creates itself.
        commit = Path(storage.table(name), "_delta_log", f"{0:020}.json")
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            if "metaData" in action:
                action["metaData"]["configuration"] = properties
        commit.write_text("\n".join(map(json.dumps, actions)))
    url = f"{storage.cache}/by-hand"
    hand_made_cache(folder, url)
    manifest = read_manifest(url)
    assert manifest is not None
    write_manifest(url, manifest.model_copy(update={"table": snapshots.latest(None, storage.table("images"))}))
    return Night(etl, manifest.settings, storage, folder)


def compact(table: Path) -> None:
    """Commit the table's file under another name, as a compaction does: no row changes."""
    commit = table / "_delta_log" / f"{0:020}.json"
    (add,) = (action["add"] for line in commit.read_text().splitlines() if "add" in (action := json.loads(line)))
    shutil.copy(table / add["path"], table / "compacted.parquet")
    remove = {"path": add["path"], "deletionTimestamp": add["modificationTime"], "dataChange": False}
    actions = [{"remove": remove}, {"add": {**add, "path": "compacted.parquet", "dataChange": False}}]
    commit.with_name(f"{1:020}.json").write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.usefixtures("full_disk")
def test_a_run_whose_cache_is_there_is_not_refused_for_want_of_room(night: Night) -> None:
    """Nor after maintenance, whose versions hold the same rows."""
    check_room(night.etl, night.cache, night.source(), night.storage)
    before = snapshots.latest(None, night.storage.table("images"))
    compact(Path(before.path))
    assert snapshots.latest(None, before.path).version > before.version
    check_room(night.etl, night.cache, night.source(), night.storage)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("change", ["new file", "removed file", "other size", "no cache", "changed rows"])
def test_a_run_that_has_a_cache_to_write_is_refused(night: Night, change: str) -> None:
    """By the room that the whole cache takes: one of other rows shares nothing with the one that is there."""
    cache = night.cache
    if change == "new file":
        write_pictures(night.folder, 1, first=100)
    elif change == "removed file":
        next(night.folder.glob("red/*")).unlink()
    elif change == "other size":
        cache = cache.model_copy(update={"image_size": 2 * cache.image_size})
    elif change == "no cache":
        shutil.rmtree(night.storage.cache)
    else:
        table = deltalake.DeltaTable(night.storage.table("images"))
        deltalake.write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")
    with pytest.raises(WrongInput, match=r"the cache in '.*' needs .* make room, lower cache.image_size"):
        check_room(night.etl, cache, night.source(), night.storage)
