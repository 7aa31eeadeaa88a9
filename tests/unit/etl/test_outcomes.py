"""Outcomes of files, computed from a few rows without Spark."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl import comparison_queries, outcomes
from tasks.etl.choice import IGNORED_ARROW
from tasks.etl.extract import MAX_FILE_BYTES
from tasks.etl.ingest import _check_gates
from tasks.etl.outcomes import Comparison
from tasks.orchestration.failure import failure_markdown
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
        "changed_at": None,
        "inode": None,
    } | values


LATER = THEN + timedelta(hours=1)
STATUS = {"changed_at": THEN, "inode": 7}
"""Time of status change and inode of a file of a local source."""


def known(path: str, sha256: str, outcome: str = "stored", **values: Any) -> Row:
    """Return a row of the ledger."""
    row = listed(path, split="train") | {"sha256": sha256, "outcome": outcome, "reason": None, "detail": None}
    return row | {"seen_at": THEN} | values


def read(path: str, sha256: str | None, part: str | None = "a", **values: Any) -> Row:
    """Return a row of READ_ARROW for a file; a file without content has no part."""
    row = listed(path, split="train") | {"sha256": sha256, "part": part, "reason": None, "detail": None}
    return row | values


def unread(path: str, *, failed: bool = True, **values: Any) -> Row:
    """Return a row of READ_ARROW for a file that cannot be read, or that is gone if `failed` is false."""
    row = read(path, None, None, split=None, reason="unreadable", detail="no", read_failed=failed)
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
        ignored: list[Row] = [],  # noqa: B006  # never changed
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
                ignored=pa.Table.from_pylist(ignored, schema=IGNORED_ARROW),
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
    return [{name: row[name] for name in LISTING_ARROW.names} for row in comparison.to_read().to_pylist()]


def test_first_run_reads_all_files_ordered_by_path(compare) -> None:
    """Without tables, all files are new and the tables are not up to date."""
    rows = [listed("cat/b.jpg"), listed("cat/a.jpg", split="val")]
    with compare(rows) as comparison:
        assert to_read(comparison) == rows[::-1]
        assert comparison.num_new() == 2
        assert not comparison.is_up_to_date()


NFC, NFD = "Caf\u00e9", "Cafe\u0301"


def test_labels_of_a_new_table_are_in_the_composed_form(compare) -> None:
    """Two forms of a label are one class, and paths stay as they are."""
    rows = [listed(f"{NFD}/a.jpg"), listed(f"{NFC}/a.jpg"), listed("bar/a.jpg"), listed("a.jpg", label=None)]
    for replaced in (False, True):
        ledger = [known(f"{NFD}/a.jpg", "1")] if replaced else []
        with compare(rows, ledger, replaced=replaced) as comparison:
            found = {row["path"]: row["label"] for row in to_read(comparison)}
            assert found == {f"{NFD}/a.jpg": NFC, f"{NFC}/a.jpg": NFC, "bar/a.jpg": "bar", "a.jpg": None}
            assert comparison.decomposed == []


@pytest.mark.parametrize(
    ("recorded", "new", "expected"),
    [
        ((NFD,), NFD, NFD),
        ((NFD,), NFC, NFD),
        ((NFC, NFD), NFC, NFC),
        ((NFC, NFD), NFD, NFD),
        ((NFC,), NFD, NFC),
    ],
)
def test_labels_of_an_older_table_keep_their_forms(compare, recorded: tuple[str, ...], new: str, expected: str) -> None:
    """Its images are not relabelled, a new file joins a class that it has, and the forms are named."""
    ledger = [known(f"{label}/a.jpg", label) for label in recorded]
    images = [existing(label, label) for label in recorded]
    before = [listed(f"{label}/a.jpg") for label in recorded]
    with compare(before, ledger, images) as comparison:
        assert comparison.is_up_to_date()
        assert comparison.decomposed == [label for label in recorded if label == NFD]
    with compare([*before, listed("new.jpg", label=new)], ledger, images) as comparison:
        assert [(row["path"], row["label"]) for row in to_read(comparison)] == [("new.jpg", expected)]


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
        whole, (batch,) = comparison.edits()
        assert whole == {"a": 2}
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


def test_deletions_are_the_contents_that_leave_the_table(compare) -> None:
    """Neither a renamed file or class, nor a copy, nor a kept image: deleted, changed and quarantined contents do."""
    ledger = [
        known("cat/renamed.jpg", "1"),
        known("cat/a.jpg", "2"),
        known("cat/b.jpg", "2", "duplicate"),
        known("cat/deleted.jpg", "3"),
        known("dog/changed.jpg", "4"),
        known("dog/moved.jpg", "5"),
        known("dog/conflict.jpg", "6"),
        known("dog/stays.jpg", "7"),
    ]
    images = [existing(row["sha256"], row["label"]) for row in ledger if row["outcome"] == "stored"]
    rows = [
        read("cat/new name.jpg", "1"),
        read("dog/changed.jpg", "8", size=11),
        read("wolf/moved.jpg", "5"),
        read("wolf/conflict.jpg", "6"),
    ]
    listing = [listed("cat/b.jpg"), listed("dog/stays.jpg"), listed("dog/conflict.jpg")]
    listing += [listed(row["path"], size=row["size"]) for row in rows]
    for keep, expected in ((False, {"cat": 1, "dog": 2}), (True, {"dog": 2})):
        with compare(listing, ledger, images, keep_deleted=keep) as comparison:
            resolve(comparison, *rows)
            assert comparison.deletions() == (expected, {"cat": 3, "dog": 4})


def test_a_replaced_source_has_no_deletions(compare) -> None:
    """With etl.replace_source, the images of the other source leave on purpose."""
    ledger = [known(f"cat/{number}.jpg", str(number)) for number in range(20)]
    images = [existing(row["sha256"], "cat") for row in ledger]
    with compare([listed("dog/a.jpg")], ledger, images, replaced=True) as comparison:
        resolve(comparison, read("dog/a.jpg", "a"))
        assert comparison.surplus().num_rows == 20
        assert comparison.deletions() == ({}, {})


TOUCHED = pytest.mark.parametrize(
    "status", [{"changed_at": LATER, "inode": 7}, {"changed_at": THEN, "inode": 8}], ids=["status time", "inode"]
)


@TOUCHED
def test_touched_file_with_the_same_content_changes_the_ledger_alone(compare, status: Row) -> None:
    """After a remount or chmod a file is read again once; outcome, time of its check and image stay."""
    ledger = [known("cat/a.jpg", "1", **STATUS), known("cat/b.jpg", "1", "duplicate", **STATUS)]
    listing = [listed("cat/a.jpg", **status), listed("cat/b.jpg", **STATUS)]
    with compare(listing, ledger, [existing("1", "cat")]) as comparison:
        assert not comparison.is_up_to_date()
        assert (comparison.num_new(), comparison.num_touched()) == (1, 1)
        (row,) = comparison.to_read().to_pylist()
        assert (row["path"], row["ledger_sha256"]) == ("cat/a.jpg", "1")

        found = resolve(comparison, read("cat/a.jpg", "1", None, ledger_sha256="1", split=None, **status))

        assert found == {"cat/a.jpg": ("stored", None)}
        (changed,) = comparison.ledger_changes(NOW).table().to_pylist()
        assert changed == ledger[0] | status | {"seen_at": NOW}
        assert comparison.surplus().num_rows == 0
        assert comparison.edits()[0] == {}
        assert comparison.groups() == [("cat", "train", "stored", None, 1), ("cat", "train", "duplicate", None, 1)]
    with compare(listing, [changed, ledger[1]], [existing("1", "cat")]) as comparison:
        assert comparison.is_up_to_date()


@TOUCHED
def test_file_replaced_in_place_with_its_size_and_time_is_a_changed_file(compare, status: Row) -> None:
    """Its old content leaves `images`, and the new one is inserted."""
    ledger = [known("cat/a.jpg", "1", **STATUS), known("dog/a.jpg", "3", **STATUS)]
    listing = [listed("cat/a.jpg", **status), listed("dog/a.jpg", **STATUS)]
    with compare(listing, ledger, [existing("1", "cat"), existing("3", "dog")]) as comparison:
        found = resolve(comparison, read("cat/a.jpg", "2", ledger_sha256="1", **status))

        assert found == {"cat/a.jpg": ("stored", None)}
        (changed,) = comparison.ledger_changes(NOW).table().to_pylist()
        assert (changed["sha256"], changed["inode"], changed["changed_at"]) == (
            "2",
            status["inode"],
            status["changed_at"],
        )
        assert comparison.surplus().to_pylist() == [{"sha256": "1"}]
        assert comparison.edits()[0] == {"a": 1}


@pytest.mark.parametrize(
    ("change", "ledger_sha256"),
    [({"changed_at": LATER}, "1"), ({"modified_at": LATER}, None), ({"size": 11}, None)],
    ids=["touched", "time", "size"],
)
def test_file_that_cannot_be_read_keeps_its_image(compare, change: Row, ledger_sha256: str | None) -> None:
    """A file whose share fails or whose permissions were taken away is not deleted: the next run tries it again."""
    ledger = [known("cat/a.jpg", "1", **STATUS), known("cat/b.jpg", "1", "duplicate", **STATUS)]
    images = [existing("1", "cat")]
    listing = [listed(path, **STATUS | change) for path in ("cat/a.jpg", "cat/b.jpg")]
    with compare(listing, ledger, images) as comparison:
        rows = [unread(row["path"], size=row["size"], ledger_sha256=ledger_sha256) for row in listing]

        assert resolve(comparison, *rows) == {}
        assert comparison.surplus().num_rows == 0
        assert comparison.edits()[0] == {}
        assert sorted(comparison.groups()) == [
            ("cat", "train", "duplicate", None, 1),
            ("cat", "train", "stored", None, 1),
        ]
        assert comparison.failed_reads() == (2, "cat/a.jpg", "no")
    with compare(listing, ledger, images) as comparison:
        assert comparison.num_new() == 2


@pytest.mark.parametrize(
    ("row", "images"),
    [
        (unread("cat/a.jpg", failed=False), [existing("1", "cat")]),
        (unread("cat/a.jpg", size=MAX_FILE_BYTES + 1), [existing("1", "cat")]),
        (read("cat/a.jpg", "2", None, split=None, reason="truncated", detail="no"), [existing("1", "cat")]),
        (unread("cat/a.jpg"), []),
    ],
    ids=["gone", "too large", "damaged", "image lost"],
)
def test_changed_file_that_is_known_to_be_unusable_loses_its_image(compare, row: Row, images: list[Row]) -> None:
    """A file that is gone, was read, or has no image in the table does not count as unchanged."""
    listing = [listed("cat/a.jpg", size=row["size"], modified_at=LATER)]
    with compare(listing, [known("cat/a.jpg", "1")], images) as comparison:
        assert resolve(comparison, row) == {"cat/a.jpg": ("quarantined", row["reason"])}
        assert comparison.surplus().num_rows == len(images)
        assert comparison.failed_reads() == (0, "", "")


@pytest.mark.parametrize("bound", [0.2, 0.19])
def test_files_that_cannot_be_read_count_as_bad_and_are_said(
    compare, bound: float, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that fails for too many files ends the run, although their images stay."""
    paths = [f"cat/{number}.jpg" for number in range(10)]
    listing = [listed(path, modified_at=LATER) for path in paths[:2]] + [listed(path) for path in paths[2:]]
    ledger, images = [known(path, path) for path in paths], [existing(path, "cat") for path in paths]
    with compare(listing, ledger, images) as comparison:
        resolve(comparison, *map(unread, paths[:2]))
        refused = pytest.raises(WrongInput, match=r"2 of 10 files cannot be used \(2 unreadable\)")
        with refused if bound < 0.2 else nullcontext():
            _check_gates(comparison, EtlConfig(max_bad_fraction=bound), storage)
    assert "2 files cannot be read now, such as cat/0.jpg (no): their images stay" in "\n".join(caplog.messages)


@pytest.mark.parametrize("settings", [{"max_bad_fraction": 0.1}, {"max_bad_fraction": 1.0, "min_images_per_class": 2}])
def test_refused_run_names_the_files_that_cannot_be_used(
    compare, settings: dict[str, Any], storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """The first 20 are in the log and in notes for the artifact; all are in a CSV file that the message names."""
    bad = [f"cat/{number:02},_x.jpg" for number in range(22)]
    unreadable, same = "cat/unreadable.jpg", ["cat/z.jpg", "dog/z.jpg"]
    listing = [listed(path) for path in [*bad, *same]] + [listed(unreadable, modified_at=LATER)]
    with compare(listing, [known(unreadable, "1")], [existing("1", "cat")]) as comparison:
        broken = [read(path, None, None, split=None, reason="truncated", detail="a\nb") for path in bad]
        resolve(comparison, *broken, *(read(path, "2") for path in same), unread(unreadable))
        with pytest.raises(WrongInput) as refused:
            _check_gates(comparison, EtlConfig.model_validate(settings), storage)

    file = storage.logs / "unusable-files.csv"
    assert f" ('{file}' lists the files that cannot be used): " in str(refused.value)
    assert str(refused.value).endswith("the tables are unchanged")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    rows = pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)).to_pylist()
    assert [row["path"] for row in rows] == [*bad, unreadable, *same]
    assert rows[0] == {"path": bad[0], "label": "cat", "reason": "truncated", "detail": "a\nb"}
    conflict = "the same content under the labels cat, dog"
    assert [(row["reason"], row["detail"]) for row in rows[-2:]] == [("label_conflict", conflict)] * 2
    notes = refused.value.__notes__
    assert (len(notes), notes[0]) == (20, r"cat/00,\_x.jpg: truncated (a b)")
    assert notes[1] in failure_markdown(refused.value, None, notes)
    assert f"all of them in {file}: {bad[0]}: truncated (a\nb); {bad[1]}: truncated" in caplog.messages[-1]
    assert bad[20] not in caplog.messages[-1]


def test_refusal_of_deletions_names_no_files(compare, storage: Storage) -> None:
    """The files that cannot be used are not its cause."""
    paths = [f"cat/{number}.jpg" for number in range(10)]
    rows = [known(path, path) for path in paths]
    with compare(
        [listed(path) for path in [*paths[:2], "bad.jpg"]], rows, [existing(path, "cat") for path in paths]
    ) as (comparison):
        resolve(comparison, read("bad.jpg", None, None, split=None, reason="truncated", detail="short"))
        with pytest.raises(WrongInput, match="max_deleted_fraction") as refused:
            _check_gates(comparison, EtlConfig(max_bad_fraction=1.0), storage)
    assert "unusable-files.csv" not in str(refused.value)


def test_file_that_cannot_be_read_passes_its_image_on(compare) -> None:
    """A copy that was read takes over the image of a deleted file as before, beside the copy that was not."""
    ledger = [known("cat/a.jpg", "1"), known("cat/b.jpg", "1", "duplicate"), known("cat/c.jpg", "2")]
    listing = [listed("cat/b.jpg", modified_at=LATER), listed("cat/c.jpg", modified_at=LATER), listed("cat/d.jpg")]
    with compare(listing, ledger, [existing("1", "cat"), existing("2", "cat")]) as comparison:
        found = resolve(comparison, unread("cat/b.jpg"), unread("cat/c.jpg"), read("cat/d.jpg", "2", None))

        assert found == {
            "cat/a.jpg": ("deleted", None),
            "cat/b.jpg": ("stored", None),
            "cat/d.jpg": ("duplicate", None),
        }
        assert comparison.surplus().num_rows == 0


def test_touched_file_that_takes_over_an_image_has_one_row(compare) -> None:
    """Its outcome changes, since the stored copy is deleted, and its status with it."""
    ledger = [known("cat/a.jpg", "1", **STATUS), known("cat/b.jpg", "1", "duplicate", **STATUS)]
    status = {"changed_at": LATER, "inode": 9}
    with compare([listed("cat/b.jpg", **status)], ledger, [existing("1", "cat")]) as comparison:
        found = resolve(comparison, read("cat/b.jpg", "1", None, ledger_sha256="1", split=None, **status))

        assert found == {"cat/a.jpg": ("deleted", None), "cat/b.jpg": ("stored", None)}
        rows = {row["path"]: row for row in comparison.ledger_changes(NOW).table().to_pylist()}
        assert (rows["cat/b.jpg"]["inode"], rows["cat/b.jpg"]["changed_at"]) == (9, LATER)
        assert comparison.surplus().num_rows == 0


def test_touched_file_whose_image_is_lost_is_new(compare) -> None:
    """It is decoded again, although its content is that of the ledger."""
    with compare([listed("cat/a.jpg", inode=8, changed_at=THEN)], [known("cat/a.jpg", "1", **STATUS)]) as comparison:
        (row,) = comparison.to_read().to_pylist()
        assert (row["path"], row["ledger_sha256"]) == ("cat/a.jpg", None)
        assert (comparison.num_new(), comparison.num_touched()) == (1, 0)


@pytest.mark.parametrize(
    ("known_status", "listed_status"),
    [({}, STATUS), (STATUS, {}), ({}, {})],
    ids=["ledger of an earlier release", "store in place of a folder", "store"],
)
def test_missing_inode_counts_as_unchanged(compare, known_status: Row, listed_status: Row) -> None:
    """An upgrade does not read a source again; nor do mixed buckets, with rows of both kinds."""
    paths = [f"cat/{number}.jpg" for number in range(20)]
    listing = [listed(path, **listed_status) for path in paths]
    ledger = [known(path, path, **known_status) for path in paths]
    images = [existing(path, "cat") for path in paths]
    with compare(listing, ledger, images) as comparison:
        assert comparison.is_up_to_date()
    ledger[3] |= STATUS
    listing[3] |= STATUS
    with compare(listing, ledger, images) as comparison:
        assert comparison.is_up_to_date()


def test_touched_file_is_found_among_rows_of_an_earlier_release(compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of paths may have rows with inodes and rows without."""
    monkeypatch.setattr(comparison_queries, "BUCKET_OF", "CREATE OR REPLACE MACRO bucket_of(text) AS 0")
    paths = [f"cat/{number}.jpg" for number in range(20)]
    listing = [listed(path, **STATUS | {"inode": number}) for number, path in enumerate(paths)]
    ledger = [known(path, path) for path in paths]
    ledger[3] |= STATUS | {"inode": 300}
    ledger[4] |= STATUS | {"inode": 4}
    with compare(listing, ledger, [existing(path, "cat") for path in paths]) as comparison:
        assert [row["path"] for row in comparison.to_read().to_pylist()] == ["cat/3.jpg"]


def test_rows_of_an_earlier_release_are_completed_with_the_next_changes(
    compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without other changes none is written; with them, a bounded number gets inode and time of status change."""
    paths = [f"cat/{number}.jpg" for number in range(20)]
    listing = [listed(path, **STATUS) for path in paths]
    ledger = [known(path, path) for path in paths]
    images = [existing(path, "cat") for path in paths]
    with compare(listing, ledger, images) as comparison:
        assert resolve(comparison) == {}
    new = listed("dog/a.jpg", **STATUS)
    for most, completed in ((1_000_000, 20), (7, 7)):
        monkeypatch.setattr(outcomes, "FILLED_ROWS", most)
        with compare([*listing, new], ledger, images) as comparison:
            found = resolve(comparison, read("dog/a.jpg", "d", **STATUS))
            rows = {row["path"]: row for row in comparison.ledger_changes(NOW).table().to_pylist()}
            assert set(found) == set(rows)
            assert len(rows) == completed + 1
            assert all(rows[row["path"]] == row | STATUS | {"seen_at": NOW} for row in ledger if row["path"] in rows)
            assert not comparison.ledger_changes(NOW).all_new
    ledger = [rows.get(row["path"], row) for row in [*ledger, rows["dog/a.jpg"]]]
    with compare([*listing, new], ledger, [*images, existing("d", "dog")]) as comparison:
        assert comparison.is_up_to_date()


def other(path: str, **values: object) -> Row:
    """Return a row of a file that is ignored."""
    return {"path": path, "size": 3, "modified_at": THEN, "changed_at": THEN, "inode": 7, "detail": "a text"} | values


IGNORED_ROW = {"label": None, "split": None, "outcome": "ignored", "reason": "other_file", "detail": "a text"}


def test_ignored_file_has_a_row_and_is_not_read(compare) -> None:
    """The next run has nothing to do, also where the source is kept or replaced."""
    for options in ({}, {"keep_deleted": True}, {"replaced": True}):
        with compare([listed("cat/1.jpg")], ignored=[other("cat/a.txt")], **options) as comparison:
            assert [row["path"] for row in to_read(comparison)] == ["cat/1.jpg"]
            assert comparison.num_new() == 2
            found = resolve(comparison, read("cat/1.jpg", "1"))
            assert found == {"cat/1.jpg": ("stored", None), "cat/a.txt": ("ignored", "other_file")}
            (row,) = [row for row in comparison.ledger_changes(NOW).table().to_pylist() if row["path"] == "cat/a.txt"]
            assert {name: row[name] for name in IGNORED_ROW} == IGNORED_ROW
            assert (row["sha256"], row["inode"]) == (None, 7)

    ledger = [other("cat/a.txt", **IGNORED_ROW)]
    with compare([], ledger, ignored=[other("cat/a.txt")]) as comparison:
        assert comparison.is_up_to_date()
        assert resolve(comparison) == {}


def test_touched_text_gets_its_new_status_alone(compare) -> None:
    """As after a remount; a second run has nothing to do."""
    ledger = [other("cat/a.txt", **IGNORED_ROW)]
    with compare([], ledger, ignored=[other("cat/a.txt", inode=8)]) as comparison:
        assert (comparison.num_touched(), comparison.is_up_to_date()) == (1, False)
        assert to_read(comparison) == []
        assert resolve(comparison) == {"cat/a.txt": ("ignored", "other_file")}
        (row,) = comparison.ledger_changes(NOW).table().to_pylist()
    assert (row["inode"], row["detail"]) == (8, "a text")
    with compare([], [row], ignored=[other("cat/a.txt", inode=8)]) as comparison:
        assert comparison.is_up_to_date()


def test_image_that_becomes_a_text_leaves_and_comes_back(compare) -> None:
    """Also with the same size and time, where the status alone differs."""
    image = known("cat/a", "1", size=3, modified_at=THEN, changed_at=THEN, inode=6)
    with compare([], [image], [existing("1", "cat")], ignored=[other("cat/a")]) as comparison:
        assert to_read(comparison) == []
        assert resolve(comparison) == {"cat/a": ("ignored", "other_file")}
        assert comparison.surplus()["sha256"].to_pylist() == ["1"]
        assert comparison.deletions()[0] == {"cat": 1}

    text = other("cat/a", **IGNORED_ROW)
    again = listed("cat/a", size=3, modified_at=THEN, changed_at=THEN, inode=6)
    with compare([again], [text]) as comparison:
        assert [row["path"] for row in to_read(comparison)] == ["cat/a"]
        assert resolve(comparison, read("cat/a", "1", **{name: again[name] for name in ("size", "inode")})) == {
            "cat/a": ("stored", None)
        }


def test_text_that_is_gone_is_deleted(compare) -> None:
    """Its row stays in the ledger, like that of an image."""
    with compare([listed("cat/1.jpg")], [other("cat/a.txt", **IGNORED_ROW)]) as comparison:
        assert resolve(comparison, read("cat/1.jpg", "1"))["cat/a.txt"] == ("deleted", None)
