"""Parquet files that a Spark task writes, called without Spark."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.etl.commits import map_files
from tasks.schema import IMAGES, IMAGES_ARROW
from tasks.tables import direct_commits, parts
from tasks.tables.parts import (
    REWRITE_ARROW,
    REWRITTEN,
    PartTarget,
    PartWriter,
    make_rewriter,
    make_row_writer,
    read_rows,
)

TODAY = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def target(tmp_path: Path) -> PartTarget:
    """Return a target for parts."""
    return PartTarget(str(tmp_path), "5eed", TODAY)


def image(number: int, label: str = "cat", num_bytes: int = 100) -> dict[str, object]:
    """Return a row of `images` without `ingested_at`."""
    return {
        "sha256": f"{number:064x}",
        "label": label,
        "content": bytes([number % 256]) * num_bytes,
        "width": 4,
        "height": 3,
        "split": "train",
        "dhash": number,
        "ingested_at": None,
    }


def test_part_has_the_columns_and_values_of_the_table(target: PartTarget) -> None:
    """A part has all columns and values, its name contains the run, and no other file is written."""
    with PartWriter(target) as writer:
        names = {writer.add(image(number)) for number in range(3)}

    (name,) = names
    assert name.startswith("part-00000-5eed-")
    assert [path.name for path in Path(target.folder).iterdir()] == [name]
    table = pq.read_table(f"{target.folder}/{name}")
    assert table.schema.equals(IMAGES_ARROW)
    assert table.to_pylist() == [image(number) | {"ingested_at": TODAY} for number in range(3)]


def test_row_groups_and_parts_are_bounded(target: PartTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups and files are limited to ROW_GROUP_BYTES and PART_BYTES."""
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 250)
    monkeypatch.setattr(parts, "PART_BYTES", 600)
    with PartWriter(target) as writer:
        names = [writer.add(image(number)) for number in range(8)]

    # Row groups of 3 images of 100 bytes; a part is full with 6.
    groups = [
        [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        for file in (pq.ParquetFile(f"{target.folder}/{name}") for name in dict.fromkeys(names))
    ]
    assert groups == [[3, 3], [2]]
    assert names == [names[0]] * 6 + [names[6]] * 2


def test_image_is_once_per_label_in_a_part(target: PartTarget) -> None:
    """Duplicates are written once, and the same image under another label is another row."""
    with PartWriter(target) as writer:
        name = [writer.add(image(*row)) for row in ((1, "cat"), (1, "cat"), (1, "dog"))][-1]

    table = pq.read_table(f"{target.folder}/{name}")
    assert table["label"].to_pylist() == ["cat", "dog"]


def test_content_has_no_statistics_and_is_not_compressed(target: PartTarget) -> None:
    """Minimum and maximum of the content would put whole images into the footer."""
    with PartWriter(target) as writer:
        name = writer.add(image(1))

    group = pq.ParquetFile(f"{target.folder}/{name}").metadata.row_group(0)
    columns = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    assert columns["content"].statistics is None
    assert columns["content"].compression == "UNCOMPRESSED"
    assert columns["sha256"].statistics.min == f"{1:064x}"


def test_writer_without_images_creates_no_file(target: PartTarget) -> None:
    """A writer without images, or with a failure before its first row group is full, creates no file."""
    with PartWriter(target):
        pass
    with suppress(OSError), PartWriter(target) as writer:
        writer.add(image(1))
        raise OSError

    assert list(Path(target.folder).iterdir()) == []


def test_rewriting_removes_the_requested_images(target: PartTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new part has the other images of every row group, and the old part is unchanged."""
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 250)
    with PartWriter(target) as writer:
        (old,) = {writer.add(image(number)) for number in range(8)}
    kept, removed = ([f"{number:064x}" for number in numbers] for numbers in ((1, 2, 7), (0, 3, 4, 5, 6, 9)))

    row = {"part": old, "contents": removed, "splits": [None] * len(removed)}
    request = pa.RecordBatch.from_pylist([row], schema=REWRITE_ARROW)
    ((new, num_rows, was),) = [
        tuple(row.values()) for batch in make_rewriter(target)([request]) for row in batch.to_pylist()
    ]
    assert was == old

    assert num_rows == 3
    assert pq.read_table(f"{target.folder}/{new}")["sha256"].to_pylist() == kept
    assert pq.ParquetFile(f"{target.folder}/{old}").metadata.num_rows == 8


def test_rewriting_writes_the_new_split_of_reassigned_images(
    target: PartTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that are not listed keep their split, and all are kept."""
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 250)
    with PartWriter(target) as writer:
        (old,) = {writer.add(image(number)) for number in range(8)}
    reassigned = {f"{number:064x}": split for number, split in ((0, "val"), (7, "test"), (9, "val"))}

    row = {"part": old, "contents": list(reassigned), "splits": list(reassigned.values())}
    request = pa.RecordBatch.from_pylist([row], schema=REWRITE_ARROW)
    ((new, num_rows, was),) = [
        tuple(row.values()) for batch in make_rewriter(target)([request]) for row in batch.to_pylist()
    ]
    assert was == old

    assert num_rows == 8
    table = pq.read_table(f"{target.folder}/{new}")
    assert table.schema.equals(IMAGES_ARROW)
    assert table["split"].to_pylist() == ["val", *["train"] * 6, "test"]
    assert table.drop_columns(["split"]).equals(pq.read_table(f"{target.folder}/{old}").drop_columns(["split"]))


def test_small_parts_are_rewritten_by_the_driver(target: PartTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of up to DRIVER_BYTES are rewritten without a Spark job, which would fail here without a session."""
    old = []
    for number in range(3):
        with PartWriter(target) as writer:
            old.append(writer.add(image(number)))
    requests = pa.table([old, [[]] * 3, [[]] * 3], schema=REWRITE_ARROW)
    size = sum(file.stat().st_size for file in Path(target.folder).iterdir())

    monkeypatch.setattr(direct_commits, "DRIVER_BYTES", size)
    done = map_files(None, target.folder, requests, make_rewriter(target), REWRITTEN)
    assert [row["was"] for row in done] == old
    for row in done:
        assert pq.read_table(f"{target.folder}/{row['part']}").equals(pq.read_table(f"{target.folder}/{row['was']}"))

    monkeypatch.setattr(direct_commits, "DRIVER_BYTES", size - 1)
    with pytest.raises(AttributeError, match="createDataFrame"):
        map_files(None, target.folder, requests, make_rewriter(target), REWRITTEN)


def test_arrow_schema_equals_the_schema_of_the_table() -> None:
    """The Arrow schema has the table's columns in order, and only dhash is nullable."""
    assert IMAGES_ARROW.names == IMAGES.names
    assert [field.name for field in IMAGES_ARROW if field.nullable] == ["dhash"]


def test_rows_of_a_task_are_read_back_from_one_file(target: PartTarget) -> None:
    """A task yields the name of one file with the rows of all its batches; a task without rows writes no file."""
    schema = pa.schema([("path", pa.string()), ("reason", pa.string())])
    batches = [
        pa.RecordBatch.from_pylist([{"path": "a", "reason": None}], schema),
        pa.RecordBatch.from_pylist([{"path": "b", "reason": "truncated"}, {"path": "c", "reason": None}], schema),
    ]
    write = make_row_writer(lambda given: given, target, schema)

    (name,) = [row["name"] for batch in write(iter(batches)) for row in batch.to_pylist()]

    assert [path.name for path in Path(target.folder).iterdir()] == [name]
    assert name.startswith("part-00000-5eed-")  # removed with the other files of the run that no commit names
    read = pa.Table.from_batches(read_rows(target, [name], schema), schema)
    assert read.equals(pa.Table.from_batches(batches))
    assert list(write(iter([]))) == []
    assert len(list(Path(target.folder).iterdir())) == 1
