"""Tests of the names of cache rows: files of the source, from tables that are read without Spark."""

from collections.abc import Callable
from datetime import UTC, datetime

import deltalake
import pyarrow as pa
import pytest

from tasks.cache.manifest import CacheManifest, open_cache
from tasks.refs import CacheRef, TableRef
from tasks.report.image_names import NUM_NAMED, image_files, name_images
from tasks.schema import FILES_ARROW
from tasks.storage import Storage

THEN = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def manifest(make_cache: Callable[..., CacheRef], storage: Storage) -> CacheManifest:
    """Return the manifest of a cache of version 0 of `images`: 12 rows of train, d to o, and 2 of val."""
    rows = [(letter, "train") for letter in "onmlkjihgfed"] + [("a", "val"), ("b", "val")]
    images = {"sha256": [row[0] for row in rows], "label": ["cat"] * 14, "split": [row[1] for row in rows]}
    deltalake.write_deltalake(storage.table("images"), pa.table(images))
    files = [
        {
            "path": f"cat/{letter}.jpg",
            "size": 1,
            "modified_at": THEN,
            "sha256": letter,
            "outcome": "stored",
            "seen_at": THEN,
        }
        for letter in "defghijklmn"
    ]
    files.append(files[0] | {"path": "cat/a copy.jpg", "outcome": "duplicate"})
    deltalake.write_deltalake(storage.table("files"), pa.Table.from_pylist(files, schema=FILES_ARROW))
    table = TableRef(path=storage.table("images"), version=0, table_id="0")
    return open_cache(make_cache({"train": 12, "val": 2})).model_copy(update={"table": table})


def test_rows_are_files_of_their_split_in_the_order_of_the_hashes(manifest: CacheManifest, storage: Storage) -> None:
    """Equal files are named by the first path, and an image without a file by its hash."""
    assert name_images(manifest, "train", [1, 0, 11], storage) == "cat/e.jpg, cat/a copy.jpg, o"


def test_only_the_first_of_many_rows_are_named(manifest: CacheManifest, storage: Storage) -> None:
    """The number of the remaining rows is given."""
    text = name_images(manifest, "train", list(range(12)), storage)
    assert text.count(",") == NUM_NAMED - 1
    assert text.endswith("cat/k.jpg and 4 more")


def test_without_the_tables_row_numbers_are_given(manifest: CacheManifest, storage: Storage) -> None:
    """This is the case for a version that no longer exists."""
    gone = manifest.model_copy(update={"table": manifest.table.model_copy(update={"version": 7})})
    assert name_images(gone, "train", [3, 1], storage) == "rows 3, 1 of the split 'train' in the cache"


def test_image_files_returns_the_file_of_every_row(manifest: CacheManifest, storage: Storage) -> None:
    """No row is omitted, however many there are; without the tables the result is None."""
    files = image_files(manifest, "train", list(range(12)), storage)
    assert files is not None
    assert files[:2] == ["cat/a copy.jpg", "cat/e.jpg"]
    assert files[11] == "o"
    assert len(files) == 12
    gone = manifest.model_copy(update={"table": manifest.table.model_copy(update={"version": 7})})
    assert image_files(gone, "train", [3], storage) is None
