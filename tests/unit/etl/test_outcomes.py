"""What becomes of every file, decided on a few rows without Spark."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

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
    """Return what reading a file gave; one without content has no part."""
    row = listed(path, split="train") | {"sha256": sha256, "part": part, "reason": None, "detail": None}
    return row | values


def held(sha256: str, label: str, split: str = "train") -> Row:
    """Return a row of `images`."""
    return {"sha256": sha256, "label": label, "split": split}


@pytest.fixture
def compare(storage: Storage):
    """Return a maker of comparisons of rows."""

    @contextmanager
    def make(
        listing: list[Row],
        ledger: list[Row] = [],  # noqa: B006
        images: list[Row] = [],  # noqa: B006
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
    """Resolve with what was read; return outcome and reason by path, of those that the ledger lacks."""
    comparison.resolve(pa.Table.from_pylist(list(rows), schema=READ_ARROW))
    changes, _ = comparison.ledger_changes(NOW)
    assert set(changes["seen_at"].to_pylist()) <= {NOW}
    return {row["path"]: (row["outcome"], row["reason"]) for row in changes.to_pylist()}


def to_read(comparison: Comparison) -> list[Row]:
    """Return the rows that are to be read."""
    return comparison.to_read().to_pylist()


def test_of_a_first_run_everything_is_read_in_the_order_of_the_paths(compare) -> None:
    """And nothing is in line."""
    rows = [listed("cat/b.jpg"), listed("cat/a.jpg", split="val")]
    with compare(rows) as comparison:
        assert to_read(comparison) == rows[::-1]
        assert comparison.num_new() == 2
        assert not comparison.is_in_line()


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
def test_what_the_listing_says_otherwise_is_read_as_the_listing_says(compare, change: Row) -> None:
    """The split that the old content decided is not the new one's."""
    row = listed("cat/a.jpg", **change)
    with compare([row], [known("cat/a.jpg", "1")], [held("1", "cat")]) as comparison:
        assert to_read(comparison) == [row]
        assert comparison.num_new() == 1


@pytest.mark.parametrize("split", [None, "train"], ids=["decided by content", "predefined"])
def test_an_unchanged_file_is_not_read(compare, split: str | None) -> None:
    """Nothing is to be done, and its outcome is what it was."""
    with compare([listed("cat/a.jpg", split=split)], [known("cat/a.jpg", "1")], [held("1", "cat")]) as comparison:
        assert comparison.is_in_line()
        assert to_read(comparison) == []
        assert resolve(comparison) == {}
        assert comparison.groups() == [("cat", "train", "stored", None, 1)]
        assert comparison.surplus().num_rows == 0


def test_a_stored_file_whose_image_is_not_there_is_new(compare) -> None:
    """Under another label it is not there either; a duplicate needs none."""
    rows = [listed("cat/a.jpg"), listed("cat/b.jpg"), listed("cat/c.jpg")]
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2"), known("cat/c.jpg", "3", "duplicate")]
    with compare(rows, ledger, [held("2", "dog")]) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a.jpg", "cat/b.jpg"]
        assert comparison.num_new() == 2


def test_what_something_else_can_settle_is_read_again_and_not_called_new(compare) -> None:
    """A file that is no image stays one."""
    rows = [listed("cat/a.jpg"), listed("cat/b.jpg")]
    ledger = [
        known("cat/a.jpg", "1", "quarantined", split=None, reason="label_conflict", detail="d"),
        known("cat/b.jpg", "2", "quarantined", split=None, reason="not_an_image", detail="d"),
    ]
    with compare(rows, ledger) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a.jpg"]
        assert comparison.num_new() == 0
        assert not comparison.is_in_line()


def test_of_equal_contents_the_first_path_is_stored(compare) -> None:
    """Whatever order they were read in; of two labels or splits none is, and a bad file is in nobody's way."""
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
        details = {row["path"]: row["detail"] for row in comparison.ledger_changes(NOW)[0].to_pylist()}
        assert details["cat/c.jpg"] == "the same content under the labels cat, dog"
        assert details["cat/d.jpg"] == "the same content in the splits train, val"
        assert details["cat/f.jpg"] == "half"


def test_a_deleted_file_is_called_so_once_and_its_image_is_surplus(compare) -> None:
    """Where its content has another path, that takes over."""
    ledger = [
        known("cat/a.jpg", "1"),
        known("cat/b.jpg", "1", "duplicate"),
        known("cat/c.jpg", "2"),
        known("cat/d.jpg", "3", "deleted"),
    ]
    with compare([listed("cat/b.jpg")], ledger, [held("1", "cat"), held("2", "cat")]) as comparison:
        assert not comparison.is_in_line()
        assert resolve(comparison) == {
            "cat/a.jpg": ("deleted", None),
            "cat/b.jpg": ("stored", None),
            "cat/c.jpg": ("deleted", None),
        }
        assert comparison.surplus().to_pylist() == [{"sha256": "2"}]


def test_images_of_deleted_files_can_be_kept_but_living_files_decide(compare) -> None:
    """One that is back under another label is that label's."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2", "deleted"), known("cat/c.jpg", "3")]
    images = [held("1", "cat"), held("2", "cat"), held("3", "cat")]
    with compare([listed("dog/c.jpg")], ledger, images, keep_deleted=True) as comparison:
        resolve(comparison, read("dog/c.jpg", "3"))
        assert comparison.kept_groups() == [("cat", "train", 2)]
        assert comparison.surplus().to_pylist() == [{"sha256": "3"}]


def test_kept_images_are_in_line(compare) -> None:
    """Not so where they are to be removed."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2", "deleted")]
    for keep in (True, False):
        with compare(
            [listed("cat/a.jpg")], ledger, [held("1", "cat"), held("2", "cat")], keep_deleted=keep
        ) as comparison:
            assert comparison.is_in_line() is keep


def test_of_another_source_equal_paths_and_times_mean_nothing(compare) -> None:
    """What it held is surplus, also where deleted files' images are kept."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2")]
    images = [held("1", "cat"), held("2", "cat")]
    with compare([listed("cat/a.jpg")], ledger, images, replaced=True, keep_deleted=True) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a.jpg"]
        assert resolve(comparison, read("cat/a.jpg", "9")) == {
            "cat/a.jpg": ("stored", None),
            "cat/b.jpg": ("deleted", None),
        }
        assert sorted(row["sha256"] for row in comparison.surplus().to_pylist()) == ["1", "2"]


def test_of_a_part_the_rows_to_insert_are_named(compare) -> None:
    """Not those of a conflict, those in another part, nor those that the table has; a part without any is left out."""
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
    with compare([listed(row["path"]) for row in rows], [], [held("5", "cat")]) as comparison:
        resolve(comparison, *rows)
        assert comparison.parts() == [("a", 2, None), ("b", 2, ["3"])]


def test_it_is_said_whether_a_change_of_the_ledger_only_adds(compare) -> None:
    """A path that was deleted and is back has a row already."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "2", "deleted")]
    for path, adds in (("cat/c.jpg", True), ("cat/b.jpg", False)):
        with compare([listed("cat/a.jpg"), listed(path)], ledger, [held("1", "cat")]) as comparison:
            comparison.resolve(pa.Table.from_pylist([read(path, "2")], schema=READ_ARROW))
            changes, only_new = comparison.ledger_changes(NOW)
            assert changes.column("path").to_pylist() == [path]
            assert only_new is adds
            assert changes.schema.equals(FILES_ARROW)
