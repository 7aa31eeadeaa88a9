"""Listing of a source without labels, and reading of its files in a task."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tasks.config.etl import BUILTIN_DIGITS
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.extract import MAX_FILE_BYTES
from tasks.predict import source as source_module
from tasks.predict.inputs import inputs_table
from tasks.predict.source import READ_ARROW, list_source, make_file_reader
from tasks.schema import FILE_ARROW
from tasks.storage import Storage


def listed(source: Path, storage: Storage) -> pa.Table:
    """Return the listing of a source."""
    found = list_source(str(source), storage.table("inputs"), storage, SparkConfig())
    assert (found.name, found.before) == (str(source), None)
    return found.listing.table()


def read(source: Path, files: pa.Table, known: dict[str, str] = {}) -> list[list[dict[str, Any]]]:  # noqa: B006  # never changed
    """Return the rows that a task reads, by batch; `known` has the known sha256 of touched files by path."""
    to_predict = files.append_column("known_sha256", pa.array(map(known.get, files["path"].to_pylist()), pa.string()))
    batches = [*make_file_reader(source)(iter(to_predict.to_batches()))]
    assert all(batch.schema == READ_ARROW for batch in batches)
    return [batch.to_pylist() for batch in batches]


def test_files_in_any_layout_are_listed_without_labels(tmp_path: Path, storage: Storage) -> None:
    """One class folder, or none, is enough; hidden files and links that lead out of the source are ignored."""
    source = tmp_path / "a b"
    for path in ("top.JPG", "x/y/z.png", "x/.hidden/1.png", "x/notes.txt"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(b"content")
    (tmp_path / "outside.png").write_bytes(b"content")
    (source / "link.png").symlink_to(tmp_path / "outside.png")

    files = listed(source, storage)

    assert files.schema == FILE_ARROW
    assert [(row["path"], row["size"]) for row in files.to_pylist()] == [("top.JPG", 7), ("x/y/z.png", 7)]
    assert listed(source, storage) == files
    assert list_source(source.as_uri(), "/none", storage, SparkConfig()).name == str(source)


def test_digits_are_a_source(storage: Storage) -> None:
    """`builtin:digits` is written out as for ETL."""
    found = list_source(BUILTIN_DIGITS, storage.table("inputs"), storage, SparkConfig())

    assert (found.location, found.listing.num_rows) == (storage.digits, 1797)


def test_source_that_cannot_be_listed_is_named_by_its_setting(tmp_path: Path, storage: Storage) -> None:
    """The error has the setting, its value, and the way out."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongInput, match=r"^predict.source is '.*/empty'"):
        listed(tmp_path / "empty", storage)
    with pytest.raises(WrongInput, match=r"^predict.source is '.*/none'"):
        listed(tmp_path / "none", storage)


def test_file_that_cannot_be_read_is_a_row_with_the_reason(tmp_path: Path, storage: Storage) -> None:
    """A file that vanished has no row, and a link that now leads out of the source is not followed."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("good.png", "gone.png", "turned.png"):
        (source / name).write_bytes(b"content")
    with (source / "huge.png").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    Path(os.fsdecode(os.fsencode(source) + b"/bytes \xff.png")).write_bytes(b"content")
    files = listed(source, storage)
    assert files.num_rows == 5
    (source / "gone.png").unlink()
    (source / "turned.png").unlink()
    (tmp_path / "outside.png").write_bytes(b"content")
    (source / "turned.png").symlink_to(tmp_path / "outside.png")

    (rows,) = read(source, files)

    found = {row["path"]: row for row in rows}
    good = found.pop("good.png")
    assert (good["sha256"], good["content"], good["error"]) == (
        hashlib.sha256(b"content").hexdigest(), b"content", None,
    )  # fmt: skip
    assert {path: (row["sha256"], row["content"]) for path, row in found.items()} == dict.fromkeys(
        ("huge.png", "turned.png", "bytes \\xff.png"), (None, None)
    )
    assert found["turned.png"]["error"] == "unreadable: a symbolic link that points outside the source"
    assert found["huge.png"]["error"].startswith("unreadable: the file has more than ")
    assert found["bytes \\xff.png"]["error"].startswith("unreadable: [Errno 2] No such file")


def test_touched_file_is_passed_on_only_if_its_content_is_another(tmp_path: Path, storage: Storage) -> None:
    """A file with the known content has a prediction, and needs no other."""
    for name in ("new.png", "other.png", "same.png"):
        (tmp_path / name).write_bytes(name.encode())
    same = hashlib.sha256(b"same.png").hexdigest()

    (rows,) = read(tmp_path, listed(tmp_path, storage), {"other.png": "0" * 64, "same.png": same})

    assert [row["content"] for row in rows] == [b"new.png", b"other.png", None]
    assert rows[2]["sha256"] == same
    status = (tmp_path / "same.png").stat()
    assert (rows[2]["inode"], rows[2]["changed_at"].timestamp()) == (status.st_ino, pytest.approx(status.st_ctime))


def test_large_files_are_passed_on_in_small_batches(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch ends as soon as its contents reach BATCH_BYTES."""
    monkeypatch.setattr(source_module, "BATCH_BYTES", 20)
    for number, size in enumerate((9, 9, 9, 50, 1)):
        (tmp_path / f"{number}.png").write_bytes(b"x" * size)

    batches = read(tmp_path, listed(tmp_path, storage))

    assert [[row["size"] for row in rows] for rows in batches] == [[9, 9, 9], [50], [1]]


@pytest.mark.parametrize(
    ("predictions", "inputs"),
    [("/a/predictions", "/a/inputs"), ("/a/other/", "/a/inputs"), ("s3a://b/c/predictions", "s3a://b/c/inputs")],
)
def test_table_of_files_is_beside_that_of_predictions(predictions: str, inputs: str) -> None:
    """Also for another table of predictions, and on a store."""
    assert inputs_table(predictions) == inputs
