"""Files of a source that have to be read, found by queries without Spark."""

from datetime import UTC, datetime, timedelta
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from tasks.predict.inputs import pending_files
from tasks.predict.source import ListedSource
from tasks.refs import ModelRef
from tasks.schema import ADDED_TO_FILES, FILE_ARROW, INPUTS_ARROW, PREDICTIONS_ARROW
from tasks.storage import Storage

NOON = datetime(2025, 5, 6, 12, tzinfo=UTC)
LATER = NOON + timedelta(seconds=1)
FILE = {"path": "a.png", "size": 3, "modified_at": NOON, "changed_at": NOON, "inode": 7}


@pytest.mark.parametrize(
    ("change", "lacking", "expected"),
    [
        ({}, (), []),
        ({"inode": 8}, (), ["aa"]),
        ({"changed_at": LATER}, (), ["aa"]),
        ({"inode": None, "changed_at": None}, (), []),
        ({"inode": 8}, ADDED_TO_FILES, []),
        ({"modified_at": LATER}, (), [None]),
    ],
    ids=["same", "inode", "status time", "store", "earlier release", "time"],
)
def test_touched_file_is_read_again_with_the_content_that_is_known(
    storage: Storage, change: dict[str, Any], lacking: tuple[str, ...], expected: list[str | None]
) -> None:
    """Nothing follows where its content is the same; rows of an earlier release have no inode and are unchanged."""
    seen = {"source": "/photos", "sha256": "aa", "seen_at": NOON}
    inputs = pa.Table.from_pylist([FILE | seen], INPUTS_ARROW).drop_columns(list(lacking))
    deltalake.write_deltalake(storage.table("inputs"), inputs)
    model = ModelRef(name="photos", version=1, run_id="run")
    row = {"sha256": "aa", "model_name": "photos", "model_version": 1, "predicted_at": NOON}
    predictions = pa.Table.from_pylist([row], PREDICTIONS_ARROW)
    deltalake.write_deltalake(storage.table("predictions"), predictions, partition_by=["model_version"])
    source = ListedSource("/photos", pa.Table.from_pylist([FILE | change], FILE_ARROW), None)

    tables = storage.table("inputs"), storage.table("predictions")
    pending, gone = pending_files(None, source, *tables, model, storage)

    assert (pending.num_rows, gone.rows.num_rows) == (len(expected), 0)
    assert pending.to_pylist() == [FILE | change | {"known_sha256": sha256} for sha256 in expected]
