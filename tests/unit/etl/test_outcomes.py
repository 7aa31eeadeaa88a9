"""Outcomes of files, computed from a few rows without Spark."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from tasks.etl import comparison_queries
from tasks.etl.outcomes import Comparison
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, READ_ARROW
from tasks.storage import Storage
from tasks.tables.relations import Relations

THEN = datetime(2026, 1, 2, tzinfo=UTC)
NOW = THEN + timedelta(days=1)

Row = dict[str, Any]


def listed(path: str, **values: Any) -> Row:
    """Return a row of the listing; the label is the folder."""
    return {
        "path": path,
        "label": path.split("/", maxsplit=1)[0],
        "split": None,
        "size": 10,
        "modified_at": THEN,
    } | values


def known(path: str, sha256: str, outcome: str = "stored", **values: Any) -> Row:
    """Return a row of the ledger."""
    row = listed(path, split="train") | {"sha256": sha256, "outcome": outcome, "reason": None, "detail": None}
    return row | {"seen_at": THEN} | values


def read(path: str, sha256: str | None, part: str | None = "a", **values: Any) -> Row:
    """Return a row of READ_ARROW for a file; a file without content has no part."""
    row = listed(path, split="train") | {"sha256": sha256, "part": part, "reason": None, "detail": None}
    return row | values


def existing(sha256: str, label: str, split: str = "train") -> Row:
    """Return a row of `images`."""
    return {"sha256": sha256, "label": label, "split": split}


@pytest.fixture
def compare(storage: Storage):
    """Return a context manager that makes a comparison of rows."""

    @contextmanager
    def make(
        listing: list[Row],
        ledger: list[Row] = [],  # noqa: B006  # never changed
        images: list[Row] = [],  # noqa: B006  # never changed
        *,
        replaced: bool = False,
        keep_deleted: bool = False,
    ) -> Iterator[Comparison]:
        with Relations(storage) as relations:
            yield Comparison(
                relations,
                pa.Table.from_pylist(listing, schema=LISTING_ARROW),
                pa.Table.from_pylist(ledger, schema=FILES_ARROW),
                pa.Table.from_pylist(images, schema=IMAGE_KEYS_ARROW),
                replaced=replaced,
                keep_deleted=keep_deleted,
            )

    return make


def resolve(comparison: Comparison, *rows: Row) -> dict[str, tuple[str, str | None]]:
    """Resolve with the rows that were read; return outcome and reason of the ledger's changes by path."""
    comparison.resolve(pa.Table.from_pylist(list(rows), schema=READ_ARROW))
    changes = comparison.ledger_changes(NOW).table()
    assert set(changes["seen_at"].to_pylist()) <= {NOW}
    return {row["path"]: (row["outcome"], row["reason"]) for row in changes.to_pylist()}


def to_read(comparison: Comparison) -> list[Row]:
    """Return the rows of the files to read."""
    return comparison.to_read().to_pylist()


def test_first_run_reads_all_files_ordered_by_path(compare) -> None:
    """Without tables, all files are new and the tables are not up to date."""
    rows = [listed("cat/b.jpg"), listed("cat/a.jpg", split="val")]
    with compare(rows) as comparison:
        assert to_read(comparison) == rows[::-1]
        assert comparison.num_new() == 2
        assert not comparison.is_up_to_date()


@pytest.mark.parametrize(
    "change",
    [
        {"size": 11},
        {"modified_at": THEN + timedelta(microseconds=1)},
        {"label": "dog"},
        {"label": None},
        {"split": "val"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_file_that_differs_from_the_ledger_is_read_again(compare, change: Row) -> None:
    """A changed file has the values of the listing, and not the split of its former content."""
    row = listed("cat/a.jpg", **change)
    with compare([row], [known("cat/a.jpg", "1")], [existing("1", "cat")]) as comparison:
        assert to_read(comparison) == [row]
        assert comparison.num_new() == 1


def test_unchanged_files_of_the_bucket_of_a_changed_one_are_not_read(compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison finds the buckets of paths and contents that differ, and in them the files."""
    monkeypatch.setattr(comparison_queries, "BUCKET_OF", "CREATE OR REPLACE MACRO bucket_of(text) AS hash(text) >> 63")
    paths = [f"cat/{number}.jpg" for number in range(20)]
    listing = [listed(path) for path in paths[:-1]]
    listing[3]["size"] += 1
    images = [existing(path, "cat") for path in paths if path != "cat/5.jpg"]
    with compare(listing, [known(path, path) for path in paths], [*images, existing("other", "cat")]) as comparison:
        assert to_read(comparison) == [listing[3], listing[5]]
        assert comparison.num_new() == 2
        assert not comparison.is_up_to_date()


@pytest.mark.parametrize("split", [None, "train"], ids=["decided by content", "predefined"])
def test_unchanged_file_is_not_read(compare, split: str | None) -> None:
    """With an unchanged file the tables are up to date, and its outcome stays the same."""
    with compare([listed("cat/a.jpg", split=split)], [known("cat/a.jpg", "1")], [existing("1", "cat")]) as comparison:
        assert comparison.is_up_to_date()
        assert to_read(comparison) == []
        assert resolve(comparison) == {}
        assert comparison.groups() == [("cat", "train", "stored", None, 1)]
        assert comparison.surplus().num_rows == 0


def test_stored_file_without_its_image_is_new(compare) -> None:
    """An image under another label does not count, and a duplicate needs no image."""
    rows = [listed("cat/a.jpg"), listed("cat/b.jpg"), listed("cat/c.jpg")]
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2"), known("cat/c.jpg", "3", "duplicate")]
    with compare(rows, ledger, [existing("2", "dog")]) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a.jpg", "cat/b.jpg"]
        assert comparison.num_new() == 2


def test_file_in_conflict_is_read_again_but_is_not_new(compare) -> None:
    """A file with a reason of READ_AGAIN is read in every run, unlike a file that is not an image."""
    rows = [listed("cat/a.jpg"), listed("cat/b.jpg")]
    ledger = [
        known("cat/a.jpg", "1", "quarantined", split=None, reason="label_conflict", detail="d"),
        known("cat/b.jpg", "2", "quarantined", split=None, reason="not_an_image", detail="d"),
    ]
    with compare(rows, ledger) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a.jpg"]
        assert comparison.num_new() == 0
        assert not comparison.is_up_to_date()


def test_first_path_of_equal_contents_is_stored(compare) -> None:
    """The order of reading has no effect; contents with two labels or splits are quarantined, bad files ignored."""
    rows = [
        read("cat/b.jpg", "1"),
        read("cat/a.jpg", "1", "b"),
        read("cat/c.jpg", "2"),
        read("dog/c.jpg", "2"),
        read("cat/d.jpg", "3"),
        read("cat/e.jpg", "3", split="val"),
        read("cat/f.jpg", "1", None, reason="truncated", detail="half"),
        read("cat/g.jpg", None, None, reason="unreadable", detail="no"),
    ]
    with compare([listed(row["path"]) for row in rows]) as comparison:
        assert resolve(comparison, *rows) == {
            "cat/a.jpg": ("stored", None),
            "cat/b.jpg": ("duplicate", None),
            "cat/c.jpg": ("quarantined", "label_conflict"),
            "dog/c.jpg": ("quarantined", "label_conflict"),
            "cat/d.jpg": ("quarantined", "split_conflict"),
            "cat/e.jpg": ("quarantined", "split_conflict"),
            "cat/f.jpg": ("quarantined", "truncated"),
            "cat/g.jpg": ("quarantined", "unreadable"),
        }
        details = {row["path"]: row["detail"] for row in comparison.ledger_changes(NOW).table().to_pylist()}
        assert details["cat/c.jpg"] == "the same content under the labels cat, dog"
        assert details["cat/d.jpg"] == "the same content in the splits train, val"
        assert details["cat/f.jpg"] == "half"


def test_deleted_file_is_recorded_once_and_its_image_is_surplus(compare) -> None:
    """If another file has the same content, that file becomes the stored one."""
    ledger = [
        known("cat/a.jpg", "1"),
        known("cat/b.jpg", "1", "duplicate"),
        known("cat/c.jpg", "2"),
        known("cat/d.jpg", "3", "deleted"),
    ]
    with compare([listed("cat/b.jpg")], ledger, [existing("1", "cat"), existing("2", "cat")]) as comparison:
        assert not comparison.is_up_to_date()
        assert resolve(comparison) == {
            "cat/a.jpg": ("deleted", None),
            "cat/b.jpg": ("stored", None),
            "cat/c.jpg": ("deleted", None),
        }
        assert comparison.surplus().to_pylist() == [{"sha256": "2"}]


def test_existing_files_take_precedence_over_kept_images(compare) -> None:
    """A kept image whose content is back under another label gets that label."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2", "deleted"), known("cat/c.jpg", "3")]
    images = [existing("1", "cat"), existing("2", "cat"), existing("3", "cat")]
    with compare([listed("dog/c.jpg")], ledger, images, keep_deleted=True) as comparison:
        resolve(comparison, read("dog/c.jpg", "3"))
        assert comparison.kept_groups() == [("cat", "train", 2)]
        assert comparison.surplus().to_pylist() == [{"sha256": "3"}]


def test_tables_with_kept_images_are_up_to_date(compare) -> None:
    """Images of deleted files are surplus only if they are not kept."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2", "deleted")]
    for keep in (True, False):
        with compare(
            [listed("cat/a.jpg")], ledger, [existing("1", "cat"), existing("2", "cat")], keep_deleted=keep
        ) as comparison:
            assert comparison.is_up_to_date() is keep


def test_another_source_replaces_all_images(compare) -> None:
    """Files with paths and times of the former source are new; its images are surplus, also with keep_deleted."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2")]
    images = [existing("1", "cat"), existing("2", "cat")]
    with compare([listed("cat/a.jpg")], ledger, images, replaced=True, keep_deleted=True) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a.jpg"]
        assert resolve(comparison, read("cat/a.jpg", "9")) == {
            "cat/a.jpg": ("stored", None),
            "cat/b.jpg": ("deleted", None),
        }
        assert sorted(row["sha256"] for row in comparison.surplus().to_pylist()) == ["1", "2"]


def test_parts_have_the_rows_to_insert(compare) -> None:
    """Images in conflict, in another part or in the table are not inserted, and parts without rows are omitted."""
    rows = [
        read("cat/a.jpg", "1"),
        read("cat/b.jpg", "2"),
        read("cat/c.jpg", "1", "b"),
        read("cat/d.jpg", "3", "b"),
        read("cat/e.jpg", "4", "c"),
        read("dog/e.jpg", "4", "c"),
        read("cat/f.jpg", "5", "d"),
        read("cat/g.jpg", None, None, reason="unreadable", detail="no"),
    ]
    with compare([listed(row["path"]) for row in rows], [], [existing("5", "cat")]) as comparison:
        resolve(comparison, *rows)
        edits = comparison.edits()
        assert edits.whole == {"a": 2}
        (batch,) = edits.batches()
        assert batch.to_pylist() == [{"part": "b", "contents": ["1"], "splits": [None]}]


def test_ledger_changes_report_whether_all_paths_are_new(compare) -> None:
    """A path that was deleted and restored has a row already."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2", "deleted")]
    for path, adds in (("cat/c.jpg", True), ("cat/b.jpg", False)):
        with compare([listed("cat/a.jpg"), listed(path)], ledger, [existing("1", "cat")]) as comparison:
            comparison.resolve(pa.Table.from_pylist([read(path, "2")], schema=READ_ARROW))
            changes = comparison.ledger_changes(NOW)
            assert changes.table().column("path").to_pylist() == [path]
            assert (changes.num_rows, changes.all_new) == (1, adds)
            assert changes.table().schema.equals(FILES_ARROW)
