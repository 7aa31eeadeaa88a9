"""Queries of a first run in so little memory that they must spill to the disk."""

import pyarrow as pa
import pytest

from tasks.etl import outcome_queries as queries
from tasks.etl.outcomes import ASSIGNED_ARROW, Comparison
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW
from tasks.storage import Storage
from tasks.tables import relations as module
from tasks.tables.relations import Relations

RESOLVED = """
CREATE TABLE resolved AS
SELECT printf('class-%03d/%08d.jpg', 0, i) AS path, 'c' AS label, NULL::VARCHAR AS split, 3 AS size,
    TIMESTAMPTZ '2026-01-01' AS modified_at, sha256(i::VARCHAR) AS sha256, 'stored' AS outcome,
    NULL::VARCHAR AS reason, NULL::VARCHAR AS detail
FROM range(800_000) s(i)
"""

STAGED = """
CREATE TABLE staged AS
SELECT sha256((CASE WHEN i % 100 = 50 THEN (i * 7919 + 1) % 400_000 ELSE i END)::VARCHAR) AS sha256, 'c' AS label,
    'train' AS split, printf('part-%05d-0123456789abcdef0123456789abcdef-0123456789ab.parquet', i // 1024) AS part
FROM range(400_000) s(i)
"""
"""Parts of which each has copies of images in other parts."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let queries need the same memory on any machine."""
    monkeypatch.setattr(module, "MAX_THREADS", 1)


def test_splits_are_assigned_to_more_images_than_fit_into_memory(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of the rows in place would fail, since it cannot spill."""
    monkeypatch.setattr(module, "MEMORY", "60MB")
    ranks = [("c", "test", 0, 80_000), ("c", "val", 80_000, 160_000), ("c", "train", 160_000, 800_000)]
    assigned = [dict(zip(ASSIGNED_ARROW.names, row, strict=True)) for row in ranks]
    with Relations(storage) as relations:
        relations.run(RESOLVED)
        relations.run("CREATE TABLE unassigned AS SELECT sha256, label, row_number() OVER () - 1 AS rank FROM resolved")
        relations.add("assigned", pa.Table.from_pylist(assigned, schema=ASSIGNED_ARROW))
        relations.run(queries.ASSIGN)
        found = dict(relations.rows("SELECT split, count(*) FROM resolved GROUP BY split"))
    assert found == {"test": 80_000, "val": 80_000, "train": 640_000}


def test_parts_are_chosen_among_more_images_than_fit_into_memory(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of the images to keep in each part would fail, since they cannot spill; those to remove are few."""
    monkeypatch.setattr(module, "MEMORY", "70MB")
    empty = [schema.empty_table() for schema in (LISTING_ARROW, FILES_ARROW, IMAGE_KEYS_ARROW)]
    with Relations(storage) as relations:
        compared = Comparison(relations, *empty, replaced=False, keep_deleted=False)
        relations.run(STAGED)
        relations.run("CREATE VIEW missing AS SELECT DISTINCT sha256, label, split FROM staged")
        edits = compared.edits()
        changes = [row for batch in edits.batches() for row in batch.to_pylist()]
    images = [(i * 7919 + 1) % 400_000 if i % 100 == 50 else i for i in range(400_000)]
    in_parts = {(number // 1024, image) for number, image in enumerate(images)}
    assert len(edits.whole) + len(changes) == len({part for part, _ in in_parts})
    assert sum(len(row["contents"]) for row in changes) == len(in_parts) - len(set(images))
    assert {split for row in changes for split in row["splits"]} == {None}
