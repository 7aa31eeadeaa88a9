"""Queries of a first run in so little memory that they must spill to the disk."""

from collections import Counter
from fractions import Fraction

import duckdb
import pytest

from tasks.etl.outcomes import Comparison
from tasks.etl.stratify import SplitRule
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, READ_ARROW
from tasks.storage import Storage
from tasks.tables import relations as module
from tasks.tables.relations import Relations

COUNT = 400_000

READ = f"""
SELECT printf('c/%08d.jpg', i) AS path, 'c' AS label, 'train' AS split, 3 AS size,
    TIMESTAMPTZ '2026-01-01' AS modified_at, TIMESTAMPTZ '2026-01-01' AS changed_at, i AS inode, NULL AS ledger_sha256,
    sha256((CASE WHEN i % 100 = 50 THEN (i * 7919 + 1) % {COUNT} ELSE i END)::VARCHAR) AS sha256,
    printf('part-%05d-0123456789abcdef0123456789abcdef-0123456789ab.parquet', i // 1024) AS part,
    NULL AS reason, NULL AS detail, NULL AS read_failed, NULL AS dhash
FROM range({COUNT}) s(i)
"""  # noqa: S608  # numbers of this module
"""Rows of files that were read into parts, of which each has copies of images in other parts."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let queries need the same memory on any machine."""
    monkeypatch.setattr(module, "MAX_THREADS", 1)


def test_first_run_needs_less_memory_than_its_rows(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update in place, and lists of the images of each part, would fail: they cannot spill."""
    monkeypatch.setattr(module, "MEMORY", "60MB")
    rule = SplitRule(7, {"train": Fraction(8, 10), "val": Fraction(1, 10), "test": Fraction(1, 10)})
    with duckdb.connect() as database:
        read = database.sql(READ).to_arrow_table().cast(READ_ARROW)
    empty = [schema.empty_table() for schema in (LISTING_ARROW, FILES_ARROW, IMAGE_KEYS_ARROW)]
    with Relations(storage) as relations:
        compared = Comparison(relations, *empty, replaced=False, keep_deleted=False, rule=rule)
        compared.resolve(read)
        stored = {split: number for _, split, outcome, _, number in compared.groups() if outcome == "stored"}
        whole, edits = compared.edits()
        changes = [row for batch in edits for row in batch.to_pylist()]

    images = [(i * 7919 + 1) % COUNT if i % 100 == 50 else i for i in range(COUNT)]
    in_parts = {(number // 1024, image) for number, image in enumerate(images)}
    assert sum(stored.values()) == len(set(images))
    assert all(abs(stored[split] - rule.shares[split] * len(set(images))) <= 1 for split in rule.shares)
    assert len(whole) + len(changes) == len({part for part, _ in in_parts})
    splits = Counter(split for row in changes for split in row["splits"])
    assert splits[None] == len(in_parts) - len(set(images))
    assert (splits["val"], splits["test"]) == (stored["val"], stored["test"])
