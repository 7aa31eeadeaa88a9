"""Writing of cache files by a Spark task, called without Spark."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tasks.cache.manifest import CacheFile, QuarantinedImage
from tasks.cache.write import PADDING, RowFileWriter, cache_schema
from tasks.cache.write_images import encode_pixels, image_schema, make_writer
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.etl.extract import examine_image
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import ImageClassifier, save_classifier
from tasks.model_package.decode import decode_pixels
from tasks.model_package.description import AS_BEFORE, NEWEST, Decoding
from tasks.model_package.reasons import BadImage
from tasks.spark.worker_log import PROGRESS_MARK, WORKER_MARK
from tests.builders.image_bytes import deep_png, deep_tiff, lossless_jpeg

SIDE, MODEL = 32, "squeezenet1_1"
CACHE = CacheConfig(image_size=SIDE)


def write_rows(folder: Path, num_rows: int, rows_per_group: int) -> CacheFile:
    """Write a file whose row i has label 10 + i and pixels of level i; return its entry in the manifest."""
    writer = RowFileWriter(str(folder), "train", 0, image_schema(CACHE), rows_per_group)
    for row in range(num_rows):
        writer.add(encode_pixels(np.full((SIDE, SIDE, 3), row, dtype=np.uint8), CACHE), 10 + row, row)
    return writer.close()


def image(number: int) -> bytes:
    """Return an encoded image that is unique to the number."""
    buffer = io.BytesIO()
    Image.new("RGB", (20 + number, 20), (number, 0, 255 - number)).save(buffer, format="PNG")
    return buffer.getvalue()


def input_batch(*places: tuple[str, int, int]) -> pa.RecordBatch:
    """Return the batch that Spark passes to the writer for the given (split, file, number of the image)."""
    return pa.RecordBatch.from_pylist(
        [
            {"split": split, "file": file, "sha256": f"{number}", "label_index": number % 2, "content": image(number)}
            for split, file, number in places
        ]
    )


def test_all_row_groups_have_equal_size(tmp_path: Path) -> None:
    """7 rows in groups of 3 give 3 groups of 3, the last with padding."""
    part = write_rows(tmp_path, 7, 3)

    footer = pq.ParquetFile(tmp_path / part.name).metadata
    assert [footer.row_group(number).num_rows for number in range(footer.num_row_groups)] == [3, 3, 3]
    assert (part.rows, part.row_groups) == (7, 3)


def test_only_padding_rows_are_marked_as_padding(tmp_path: Path) -> None:
    """Labels and row numbers of images are as given, and those of the two padding rows are -1."""
    table = pq.read_table(tmp_path / write_rows(tmp_path, 7, 3).name)

    assert table.schema.equals(cache_schema(SIDE * SIDE * 3))
    assert table["row"].to_pylist() == [*range(7), PADDING, PADDING]
    assert table["label"].to_pylist() == [*range(10, 17), PADDING, PADDING]


def test_pixels_are_written_raw(tmp_path: Path) -> None:
    """A row is the image's pixels in HWC order, and a padding row has as many bytes."""
    pixels = pq.read_table(tmp_path / write_rows(tmp_path, 2, 3).name)["pixels"].to_pylist()

    assert pixels[1] == bytes([1]) * SIDE * SIDE * 3
    assert len(pixels[2]) == SIDE * SIDE * 3


def test_exact_number_of_rows_needs_no_padding(tmp_path: Path) -> None:
    """6 rows in groups of 3 give 2 groups without padding."""
    part = write_rows(tmp_path, 6, 3)

    assert part.row_groups == 2
    assert PADDING not in pq.read_table(tmp_path / part.name)["row"].to_pylist()


def test_manifest_has_size_and_digest_of_the_file(tmp_path: Path) -> None:
    """Size and digest, computed while writing, equal those of the file."""
    part = write_rows(tmp_path, 7, 3)

    content = (tmp_path / part.name).read_bytes()
    assert part.bytes == len(content)
    assert part.sha256 == hashlib.sha256(content).hexdigest()


def test_two_attempts_write_two_files_of_the_same_content(tmp_path: Path) -> None:
    """A retried task writes another file than the first attempt, with the same bytes."""
    first, second = write_rows(tmp_path, 7, 3), write_rows(tmp_path, 7, 3)

    assert first.name != second.name
    assert first.sha256 == second.sha256


def test_one_file_is_written_per_split_and_file_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of the same split and file number are written to one file, even from several batches."""
    write = make_writer(str(tmp_path), CACHE, NEWEST, {"train": 2, "val": 1}, {"train": 3, "val": 2})
    batches = [
        input_batch(("train", 0, 0), ("train", 0, 1)),
        input_batch(("train", 0, 2), ("train", 1, 3), ("val", 0, 0)),
    ]

    (written,) = write(iter(batches))

    files = [CacheFile.model_validate_json(text) for text in written["file"].to_pylist()]
    parts = list(zip(written["split"].to_pylist(), files, strict=True))
    assert [(split, file.rows, file.row_groups) for split, file in parts] == [
        ("train", 3, 2),
        ("train", 1, 1),
        ("val", 1, 1),
    ]
    assert sorted(file.name for file in files) == sorted(file.name for file in tmp_path.iterdir())
    numbers = [pq.read_table(tmp_path / file.name)["row"].to_pylist() for file in files]
    assert numbers == [[0, 1, 2, PADDING], [3, PADDING], [0]]
    # The first image is reported at once, so that the start of a long step is visible.
    counted = f"{PROGRESS_MARK}{os.getpid()} cache 0 1\n"
    assert capsys.readouterr().err == f"{counted}{WORKER_MARK}wrote 3 cache files, 5 images\n"


def test_images_are_decoded_by_decode_pixels(tmp_path: Path) -> None:
    """The cache has the pixels of decode_pixels, as used in serving."""
    write = make_writer(str(tmp_path), CACHE, NEWEST, {"train": 2}, {"train": 2})

    (batch,) = write(iter([input_batch(("train", 2, 5))]))

    file = CacheFile.model_validate_json(batch["file"][0].as_py())
    row = pq.read_table(tmp_path / file.name).to_pylist()[0]
    assert row == {"pixels": decode_pixels(image(5), SIDE).tobytes(), "label": 1, "row": 4}


RAMP = np.arange(256, dtype=np.uint16).reshape(16, 16, 1)
DEEP = {
    "stated": deep_png(RAMP * 16 + 3, (b"sBIT", b"\x0c")),
    "unknown": deep_png(RAMP * 16 + 3),
    "full": deep_png(RAMP * 257),
    "small": deep_tiff(RAMP, t341=255),
    "lossless JPEG, which has no other scale": lossless_jpeg(96),
    "unknown, stored as JPEG": deep_png(np.tile(RAMP * 16 + 3, (3, 3, 1))),
    "full, stored as JPEG": deep_png(np.tile(RAMP * 257, (3, 3, 1))),
}


@pytest.mark.parametrize("decoding", [AS_BEFORE, NEWEST, Decoding(sample_bits=12)])
def test_etl_cache_and_inference_decode_alike(tmp_path: Path, decoding: Decoding) -> None:
    """For each version, ETL, cache and a model see the same pixels, or refuse a file for the same reason."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    save_classifier(tmp_path / "package", MODEL, state, ("ant", "bee"), SIDE, decoding=decoding)
    model = ImageClassifier.load(tmp_path / "package", torch.device("cpu"))
    etl = EtlConfig(stored_side=32, decode_version=decoding.version, sample_bits=decoding.sample_bits)
    write = make_writer(str(tmp_path), CACHE, decoding, {"train": 1}, {"train": 1})
    reasons = {}
    for name, content in DEEP.items():
        row = examine_image(content, "ant", "train", etl)
        given = {"split": "train", "file": 0, "sha256": "", "label_index": 0, "content": row["content"] or content}
        (written,) = write(iter([pa.RecordBatch.from_pylist([given])]))
        (found,) = model.predict([given["content"]])
        if row["reason"] is not None:
            reasons[name] = row["reason"]
            (_file, bad) = written["quarantined"].to_pylist()
            assert QuarantinedImage.model_validate_json(bad).reason == found.error
            assert found.error == f"{row['reason']}: {row['detail']}"
            continue
        pixels = decode_pixels(given["content"], SIDE, decoding)
        file = CacheFile.model_validate_json(written["file"][0].as_py())
        assert pq.read_table(tmp_path / file.name)["pixels"].to_pylist() == [pixels.tobytes()]
        (logits,) = model.logits(torch.tensor(pixels[None]))
        assert found.probability == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)
    assert set(reasons.values()) <= {"unknown_range"}
    assert list(reasons) == {
        AS_BEFORE: [],
        NEWEST: ["unknown", "unknown, stored as JPEG"],
    }.get(decoding, ["full", "full, stored as JPEG"])


def test_empty_partition_writes_no_file(tmp_path: Path) -> None:
    """An empty partition gives no file and no row."""
    write = make_writer(str(tmp_path), CACHE, NEWEST, {"train": 2}, {"train": 2})

    assert list(write(iter([]))) == []
    assert list(tmp_path.iterdir()) == []


def test_build_without_memory_for_an_image_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry may decode it, and a cache that lacks it would be found for ever."""

    def without_memory(*_args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tasks.model_package.decode._decode", without_memory)
    writer = make_writer(str(tmp_path), CACHE, NEWEST, {"train": 2}, {"train": 9})
    with pytest.raises(BadImage, match="^unreadable: memory ran out while it was decoded$"):
        list(writer(iter([input_batch(("train", 0, 0))])))


def test_image_that_cannot_be_decoded_is_reported(tmp_path: Path) -> None:
    """An image that cannot be decoded is named with its reason, and fails neither the task nor the other images."""
    rows = input_batch(("train", 0, 0), ("train", 0, 1), ("train", 0, 2)).to_pylist()
    rows[1]["content"] = b"no image"

    (written,) = make_writer(str(tmp_path), CACHE, NEWEST, {"train": 2}, {"train": 9})(
        iter([pa.RecordBatch.from_pylist(rows)])
    )

    file, bad = written.to_pylist()
    assert CacheFile.model_validate_json(file["file"]).rows == 2
    assert QuarantinedImage.model_validate_json(bad["quarantined"]) == QuarantinedImage(
        sha256="1", split="train", reason="not_an_image: no image format starts with b'no image'"
    )
