"""What a Spark task writes into a cache, called here without Spark."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.cache.manifest import CacheFile
from tasks.cache.write import PADDING, CacheFileWriter, make_writer
from tasks.config.cache import CacheConfig
from tasks.decode import BadImage, decode_pixels
from tasks.schema import CACHE_PART_ARROW, cache_schema
from tasks.spark.worker_log import PROGRESS_MARK, WORKER_MARK

SIDE = 16
CACHE = CacheConfig(image_size=SIDE)


def write_rows(folder: Path, num_rows: int, rows_per_group: int) -> CacheFile:
    """Write a file whose row i has the label 10 + i and pixels of level i; return its part of the manifest."""
    writer = CacheFileWriter(str(folder), "train", 0, CACHE, rows_per_group)
    for row in range(num_rows):
        writer.add(np.full((SIDE, SIDE, 3), row, dtype=np.uint8), 10 + row, row)
    return writer.close()


def image(number: int) -> bytes:
    """Return an encoded image that no other number gives."""
    buffer = io.BytesIO()
    Image.new("RGB", (20 + number, 20), (number, 0, 255 - number)).save(buffer, format="PNG")
    return buffer.getvalue()


def given(*places: tuple[str, int, int]) -> pa.RecordBatch:
    """Return the rows that Spark hands over for the given (split, file, row)."""
    return pa.RecordBatch.from_pylist(
        [
            {"split": split, "file": file, "row": row, "label_index": row % 2, "content": image(row)}
            for split, file, row in places
        ]
    )


def test_every_row_group_has_exactly_its_rows(tmp_path: Path) -> None:
    """7 rows in groups of 3 are 3 groups of 3, the last one padded."""
    part = write_rows(tmp_path, 7, 3)

    footer = pq.ParquetFile(tmp_path / part.name).metadata
    assert [footer.row_group(number).num_rows for number in range(footer.num_row_groups)] == [3, 3, 3]
    assert (part.rows, part.row_groups) == (7, 3)


def test_padding_is_marked_and_nothing_else_is(tmp_path: Path) -> None:
    """Labels and row numbers of images come back as given; the two rows of padding have -1 in both."""
    table = pq.read_table(tmp_path / write_rows(tmp_path, 7, 3).name)

    assert table.schema.equals(cache_schema(SIDE * SIDE * 3))
    assert table["row"].to_pylist() == [*range(7), PADDING, PADDING]
    assert table["label"].to_pylist() == [*range(10, 17), PADDING, PADDING]


def test_pixels_are_written_raw(tmp_path: Path) -> None:
    """A row is the image's bytes, height by width by channel, padding as many."""
    pixels = pq.read_table(tmp_path / write_rows(tmp_path, 2, 3).name)["pixels"].to_pylist()

    assert pixels[1] == bytes([1]) * SIDE * SIDE * 3
    assert len(pixels[2]) == SIDE * SIDE * 3


def test_exact_number_of_rows_needs_no_padding(tmp_path: Path) -> None:
    """6 rows in groups of 3 are 2 groups."""
    part = write_rows(tmp_path, 6, 3)

    assert part.row_groups == 2
    assert PADDING not in pq.read_table(tmp_path / part.name)["row"].to_pylist()


def test_manifest_says_size_and_digest_of_the_file(tmp_path: Path) -> None:
    """What was counted on the way through is what lies on the disk."""
    part = write_rows(tmp_path, 7, 3)

    content = (tmp_path / part.name).read_bytes()
    assert part.bytes == len(content)
    assert part.sha256 == hashlib.sha256(content).hexdigest()


def test_two_attempts_write_two_files_of_the_same_content(tmp_path: Path) -> None:
    """A retried task never writes into the file of the first, and its bytes are the same."""
    first, second = write_rows(tmp_path, 7, 3), write_rows(tmp_path, 7, 3)

    assert first.name != second.name
    assert first.sha256 == second.sha256


def test_one_file_is_written_for_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of one split and file number go into one file, also across batches."""
    write = make_writer(str(tmp_path), CACHE, {"train": 2, "val": 1})
    batches = [given(("train", 0, 0), ("train", 0, 1)), given(("train", 0, 2), ("train", 1, 3), ("val", 0, 0))]

    parts = pa.Table.from_batches(list(write(iter(batches))), schema=CACHE_PART_ARROW).to_pylist()

    assert [(part["split"], part["rows"], part["row_groups"]) for part in parts] == [
        ("train", 3, 2),
        ("train", 1, 1),
        ("val", 1, 1),
    ]
    assert sorted(part["name"] for part in parts) == sorted(file.name for file in tmp_path.iterdir())
    # The first image is counted at once, so that a long step is seen to have begun.
    counted = f"{PROGRESS_MARK}{os.getpid()} cache 0 1\n"
    assert capsys.readouterr().err == f"{counted}{WORKER_MARK}wrote 3 cache files, 5 images\n"


def test_images_are_decoded_by_the_one_function(tmp_path: Path) -> None:
    """The cache holds what decode_pixels gives, which is what serving sees."""
    write = make_writer(str(tmp_path), CACHE, {"train": 2})

    (batch,) = write(iter([given(("train", 0, 5))]))

    row = pq.read_table(tmp_path / batch.to_pylist()[0]["name"]).to_pylist()[0]
    assert row == {"pixels": decode_pixels(image(5), SIDE).tobytes(), "label": 1, "row": 5}


def test_nothing_is_written_for_no_images(tmp_path: Path) -> None:
    """An empty partition leaves no file and no row."""
    write = make_writer(str(tmp_path), CACHE, {"train": 2})

    assert list(write(iter([]))) == []
    assert list(tmp_path.iterdir()) == []


def test_image_that_cannot_be_decoded_fails_the_task(tmp_path: Path) -> None:
    """ETL let only good images through: a bad one here is no row to drop."""
    bad = pa.RecordBatch.from_pylist(
        [{"split": "train", "file": 0, "row": 0, "label_index": 0, "content": b"no image"}]
    )

    with pytest.raises(BadImage):
        list(make_writer(str(tmp_path), CACHE, {"train": 2})(iter([bad])))
