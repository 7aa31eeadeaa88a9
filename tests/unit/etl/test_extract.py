"""Processing of files in a Spark task, called without Spark."""

import errno
import hashlib
import io
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from pyspark.serializers import CloudPickleSerializer

from tasks.config.etl import EtlConfig
from tasks.etl import extract
from tasks.etl.extract import Edges, dhash, examine_image, make_decoder, make_reader, read_image
from tasks.etl.listing import list_images
from tasks.model_package.decode import decode_pixels, fit_within, letterbox
from tasks.model_package.reasons import BadImage, Reason
from tasks.refs import SPLITS, TRAIN
from tasks.schema import READ_ARROW
from tasks.spark.worker_log import PROGRESS_MARK, WORKER_MARK
from tasks.tables.parts import PartTarget, make_rewriter, make_row_writer
from tests.builders.image_bytes import scan_bomb
from tests.builders.loaded_modules import loaded_modules


def save(file: Path, size: tuple[int, int], **options: Any) -> bytes:
    """Write an image of random noise and return the file's bytes."""
    samples = np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(samples).save(file, **options)
    return file.read_bytes()


def read(
    file: Path, root: Path, label: str | None = "cat", split: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Read one file as a Spark task would."""
    etl = EtlConfig.model_validate({"max_pixels": 1_000_000} | settings)
    return read_image(file, label, split, os.path.realpath(root), etl)


def part_target(folder: Path) -> PartTarget:
    """Return a target for the parts of a run."""
    folder.mkdir(exist_ok=True)
    return PartTarget(str(folder), "5eed", datetime(2026, 1, 2, tzinfo=UTC))


def to_read(source: Path) -> pa.Table:
    """Return the files of a source as new files to read."""
    listing = list_images(source).table()
    return listing.append_column("ledger_sha256", pa.nulls(listing.num_rows, pa.string()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_turned_upright_once(orientation: int, tmp_path: Path) -> None:
    """Stored as it is, or scaled down, it has the pixels of PIL's upright image, in every format with EXIF."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    for stored_side, number in ((512, 1), (48, 2)):
        for name, options in (("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
            file = tmp_path / f"{name}-{number}"
            corners = Image.fromarray(np.array([[[250, 10, 10], [10, 250, 10]], [[10, 10, 250], [240, 240, 20]]], "u1"))
            corners.resize((90, 60), Image.Resampling.NEAREST).save(file, name, exif=exif, **options)
            row = read(file, tmp_path, stored_side=stored_side)
            upright = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
            assert (row["width"], row["height"]) == upright.size
            pixels = decode_pixels(row["content"], 32).astype(int)
            expected = letterbox(upright, 32).astype(int)
            assert np.abs(pixels - expected).mean() < 12, (name, stored_side)


def test_small_image_is_stored_byte_for_byte(tmp_path: Path) -> None:
    """An image within stored_side is stored as the original file."""
    content = save(tmp_path / "cat" / "1.jpg", (60, 40))

    row = read(tmp_path / "cat" / "1.jpg", tmp_path, stored_side=60)

    assert row["content"] == content
    assert row["sha256"] == hashlib.sha256(content).hexdigest()
    assert (row["width"], row["height"]) == (60, 40)
    assert row["reason"] is None


def test_large_image_is_scaled_down_and_keeps_its_identity(tmp_path: Path) -> None:
    """sha256, width and height are the original's; the content is a JPEG whose longest side is stored_side."""
    original = save(tmp_path / "cat" / "1.png", (120, 60))

    row = read(tmp_path / "cat" / "1.png", tmp_path, stored_side=64)

    stored = Image.open(io.BytesIO(row["content"]))
    assert (stored.format, stored.size) == ("JPEG", (64, 32))
    assert row["sha256"] == hashlib.sha256(original).hexdigest()
    assert (row["width"], row["height"]) == (120, 60)


def test_size_is_that_of_the_upright_image(tmp_path: Path) -> None:
    """Width and height are those after EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "cat" / "1.jpg", (60, 40), exif=exif)

    row = read(tmp_path / "cat" / "1.jpg", tmp_path)

    assert (row["width"], row["height"]) == (40, 60)


def test_bad_file_has_a_reason_and_no_content(tmp_path: Path) -> None:
    """A quarantined file has its sha256 in the ledger, but no content."""
    file = tmp_path / "cat" / "1.jpg"
    file.parent.mkdir()
    file.write_bytes(b"no image")

    row = read(file, tmp_path)

    assert row["reason"] == "not_an_image"
    assert row["detail"]
    assert row["content"] is None
    assert row["sha256"] == hashlib.sha256(b"no image").hexdigest()


def test_image_with_more_than_max_pixels_has_a_reason(tmp_path: Path) -> None:
    """The setting max_pixels is passed to the decoder."""
    save(tmp_path / "cat" / "1.png", (1001, 1000), compress_level=0)

    assert read(tmp_path / "cat" / "1.png", tmp_path)["reason"] == "too_many_pixels"


def test_image_without_class_folder_has_a_reason(tmp_path: Path) -> None:
    """An image at the top of the source is quarantined, since it has no label."""
    save(tmp_path / "1.png", (8, 8))

    row = read(tmp_path / "1.png", tmp_path, label=None)

    assert row["reason"] == "label_missing"
    assert row["content"] is None


@pytest.mark.parametrize(("size", "reason"), [((1, 9), "too_small"), ((9, 1), "too_small"), ((2, 2), None)])
def test_image_smaller_than_min_side_has_a_reason(tmp_path: Path, size: tuple[int, int], reason: str | None) -> None:
    """An image with a side shorter than min_side, such as a tracking pixel, is quarantined."""
    save(tmp_path / "cat" / "1.png", size)

    assert read(tmp_path / "cat" / "1.png", tmp_path, min_side=2)["reason"] == reason


def test_predefined_split_takes_precedence_over_the_content(tmp_path: Path) -> None:
    """A predefined split is kept, also for a file that cannot be used."""
    save(tmp_path / "cat" / "1.png", (8, 8))
    (tmp_path / "cat" / "2.png").write_bytes(b"")

    for split in SPLITS:
        assert read(tmp_path / "cat" / "1.png", tmp_path, split=split, split_by="folder")["split"] == split
        assert read(tmp_path / "cat" / "2.png", tmp_path, split=split, split_by="folder")["split"] == split


def test_image_outside_the_split_folders_has_a_reason(tmp_path: Path) -> None:
    """With splits by folder, an image outside the split folders is quarantined."""
    save(tmp_path / "cat" / "1.png", (8, 8))

    row = read(tmp_path / "cat" / "1.png", tmp_path, split_by="folder")

    assert (row["reason"], row["content"], row["split"]) == ("split_missing", None, None)


@pytest.mark.parametrize(
    ("labels", "detail"),
    [
        ({}, "the file is not in a class folder"),
        ({"by": "pattern", "pattern": "x(y)"}, "etl.labels.pattern finds no label in the path"),
        ({"by": "file", "file": "labels.csv"}, "etl.labels.file has no label for the path"),
    ],
)
def test_detail_of_a_missing_label_names_the_setting(tmp_path: Path, labels: dict[str, str], detail: str) -> None:
    """The ledger's detail tells the user where the label was expected."""
    save(tmp_path / "1.png", (8, 8))

    row = read(tmp_path / "1.png", tmp_path, label=None, labels=labels)

    assert (row["reason"], row["detail"]) == ("label_missing", detail)


def test_image_has_its_perceptual_hash_and_a_bad_file_none(tmp_path: Path) -> None:
    """The hash is that of the stored image: the original, or the image scaled down."""
    save(tmp_path / "cat" / "1.png", (64, 64))
    (tmp_path / "cat" / "2.png").write_bytes(b"bad")

    whole = read(tmp_path / "cat" / "1.png", tmp_path)["dhash"]

    original = Image.open(tmp_path / "cat" / "1.png")
    assert whole == dhash(original)
    assert read(tmp_path / "cat" / "1.png", tmp_path, stored_side=16)["dhash"] == dhash(fit_within(original, 16))
    assert read(tmp_path / "cat" / "2.png", tmp_path)["dhash"] is None


def test_file_deleted_since_the_listing_has_a_reason(tmp_path: Path) -> None:
    """A file that was deleted since the listing is quarantined as unreadable, and does not fail the job."""
    row = read(tmp_path / "cat" / "gone.jpg", tmp_path)

    assert row["reason"] == "unreadable"
    assert row["sha256"] is None
    assert row["read_failed"] is False


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_file_that_may_be_there_is_a_failed_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The error of a share or a permission is not taken for a file that is gone or damaged."""

    def fail(*_arguments: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(extract, "read_whole", fail)
    row = read(tmp_path / "cat" / "1.jpg", tmp_path)

    assert (row["reason"], row["sha256"], row["read_failed"]) == ("unreadable", None, True)


def test_file_whose_decoding_needs_more_memory_is_a_failed_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image that it had is kept, as the file is not known to be bad."""

    def fail(*_arguments: object) -> None:
        raise BadImage(Reason.UNREADABLE, "memory ran out")

    save(tmp_path / "cat" / "1.png", (20, 20))
    monkeypatch.setattr(extract, "store_image", fail)
    row = read(tmp_path / "cat" / "1.png", tmp_path)

    assert (row["reason"], row["sha256"], row["read_failed"]) == ("unreadable", None, True)


def test_file_that_changes_while_it_is_read_is_read_by_a_later_run(tmp_path: Path) -> None:
    """A file that changes while it is read is unreadable in this run, and read in a later one."""
    file, stop = tmp_path / "source" / "red" / "1.png", threading.Event()
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(16 << 20))

    def write() -> None:
        with file.open("r+b", buffering=0) as handle:
            while not stop.is_set():
                os.pwrite(handle.fileno(), os.urandom(4096), 15 << 20)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        # Its modification time has the kernel's tick as resolution: a read within a tick does not see a change.
        rows = [read_image(file, "red", None, str(tmp_path / "source"), EtlConfig()) for _ in range(10)]
    finally:
        stop.set()
        writer.join()
    assert ("unreadable", "the file changed while it was read") in {(row["reason"], row["detail"]) for row in rows}
    assert read_image(file, "red", None, str(tmp_path / "source"), EtlConfig())["reason"] == "not_an_image"


def test_file_that_became_a_link_out_of_the_source_is_not_read(tmp_path: Path) -> None:
    """The check that a file is inside the source is repeated when the file is read."""
    save(tmp_path / "elsewhere" / "1.png", (8, 8))
    (tmp_path / "source" / "cat").mkdir(parents=True)
    link = tmp_path / "source" / "cat" / "1.png"
    link.symlink_to(tmp_path / "elsewhere" / "1.png")

    row = read(link, tmp_path / "source")

    assert row["reason"] == "unreadable"
    assert "points outside the source" in row["detail"]
    assert row["content"] is None


def test_reader_returns_one_row_per_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Usable and bad files give one row each in READ_ARROW, one log line per task, and images in the named part."""
    save(tmp_path / "cat" / "1.png", (8, 8))
    save(tmp_path / "dog" / "2.png", (9, 9))
    (tmp_path / "dog" / "3.png").write_bytes(b"")
    listing = to_read(tmp_path)
    reader = make_reader(tmp_path, EtlConfig(val_fraction=0.0, test_fraction=0.0), part_target(tmp_path / "table"))

    batches = list(reader(iter(listing.to_batches(max_chunksize=2))))

    rows = pa.Table.from_batches(batches, schema=READ_ARROW)
    assert rows["path"].to_pylist() == ["cat/1.png", "dog/2.png", "dog/3.png"]
    assert rows["label"].to_pylist() == ["cat", "dog", "dog"]
    assert rows["split"].to_pylist() == [TRAIN, TRAIN, None]
    assert rows["reason"].to_pylist() == [None, None, "zero_bytes"]
    (part,) = {*rows["part"].to_pylist()[:2]}
    assert rows["part"][2].as_py() is None
    images = pq.read_table(tmp_path / "table" / part)
    assert images["sha256"].to_pylist() == rows["sha256"].to_pylist()[:2]
    assert images["content"].to_pylist() == [(tmp_path / name).read_bytes() for name in ("cat/1.png", "dog/2.png")]
    names = [name for name in listing.column_names if name != "split"]
    assert rows.select(names).equals(listing.select(names))
    # The first file is counted at once, so that the progress shows the start of a long task.
    counted = f"{PROGRESS_MARK}{os.getpid()} etl 0 1\n"
    assert capsys.readouterr().err == f"{counted}{WORKER_MARK}read 3 files, 1 of them unusable\n"


def test_touched_file_with_the_content_of_the_ledger_is_not_decoded(tmp_path: Path) -> None:
    """Its row has the digest alone, and no part; with another content, or unreadable, it is a file like any other."""
    for name in ("changed", "gone", "same"):
        save(tmp_path / "cat" / f"{name}.png", (8, 8 + len(name)))
    (tmp_path / "cat" / "broken.png").write_bytes(b"no image")
    known = [
        hashlib.sha256((tmp_path / path).read_bytes()).hexdigest() for path in to_read(tmp_path)["path"].to_pylist()
    ]
    known[1] = "0" * 64  # of changed.png
    listing = to_read(tmp_path).set_column(7, "ledger_sha256", pa.array(known))
    (tmp_path / "cat" / "gone.png").unlink()

    batches = make_reader(tmp_path, EtlConfig(), part_target(tmp_path / "table"))(iter(listing.to_batches()))

    rows = {row["path"]: row for row in pa.Table.from_batches(batches).to_pylist()}
    found = {path: (row["sha256"], row["reason"], row["part"] is not None) for path, row in rows.items()}
    assert found == {
        "cat/broken.png": (known[0], None, False),
        "cat/changed.png": (hashlib.sha256((tmp_path / "cat/changed.png").read_bytes()).hexdigest(), None, True),
        "cat/gone.png": (None, "unreadable", False),
        "cat/same.png": (known[3], None, False),
    }


def test_reader_without_files_returns_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty partition gives no rows, log lines or files."""
    target = part_target(tmp_path / "table")
    reader = make_reader(tmp_path, EtlConfig(), target)

    assert list(reader(iter([]))) == []
    assert capsys.readouterr().err == ""
    assert list(Path(target.folder).iterdir()) == []


def test_images_near_an_edge_between_two_splits_are_in_a_separate_part(tmp_path: Path) -> None:
    """Images whose split the driver may change are in a separate part; without edges there is a single part."""
    for number in range(40):
        save(tmp_path / "cat" / f"{number}.png", (8 + number, 8))
    listing, etl, target = to_read(tmp_path), EtlConfig(), part_target(tmp_path / "table")
    edges = Edges(etl.split_seed, (0.1, 0.2), {"cat": 3000})
    rows = pa.Table.from_batches(make_reader(tmp_path, etl, target, edges)(iter(listing.to_batches()))).to_pylist()

    near = {row["sha256"]: edges.has(row["sha256"], "cat") for row in rows}
    assert 0 < sum(near.values()) < 20
    parts = {is_near: {row["part"] for row in rows if near[row["sha256"]] == is_near} for is_near in (True, False)}
    for is_near, names in parts.items():
        (name,) = names
        found = pq.read_table(f"{target.folder}/{name}")["sha256"].to_pylist()
        assert sorted(found) == sorted(sha256 for sha256, one in near.items() if one == is_near)
    whole = pa.Table.from_batches(make_reader(tmp_path, etl, target)(iter(listing.to_batches())))
    assert len(whole["part"].unique()) == 1


def test_decoder_returns_the_same_rows_as_the_reader(tmp_path: Path) -> None:
    """Files read by Spark give the same rows, and files that Spark could not read are unreadable with its reason."""
    save(tmp_path / "cat" / "1.png", (8, 8))
    save(tmp_path / "dog" / "2.png", (90, 9))
    for name in ("3.png", "4.png"):
        (tmp_path / "dog" / name).write_bytes(b"")
    listing, etl = to_read(tmp_path), EtlConfig(stored_side=64)
    contents = [(tmp_path / path).read_bytes() for path in listing["path"].to_pylist()]
    loaded = listing.append_column("content", pa.array(contents, pa.binary()))
    reasons = [None, None, "FileNotFoundException: gone", "AccessDeniedException: 403"]
    loaded = loaded.append_column("unreadable", pa.array(reasons, pa.string()))

    target = part_target(tmp_path / "table")
    read = pa.Table.from_batches(make_reader(tmp_path, etl, target)(iter(listing.to_batches()))).to_pylist()
    decoded = pa.Table.from_batches(make_decoder(etl, target)(iter(loaded.to_batches()))).to_pylist()

    images = [pq.read_table(f"{target.folder}/{rows[0].pop('part')}") for rows in (read, decoded)]
    assert images[0].num_rows == 2
    assert images[0].equals(images[1])
    assert read[1].pop("part") != decoded[1].pop("part")
    assert decoded[:2] == read[:2]
    assert (decoded[2]["reason"], decoded[2]["detail"]) == ("unreadable", "FileNotFoundException: gone")
    assert [row["sha256"] for row in decoded[2:]] == [None, None]
    assert [row["read_failed"] for row in decoded] == [None, None, False, True]


def test_scan_bomb_is_quarantined_and_an_ordinary_progressive_jpeg_is_stored() -> None:
    """A JPEG with too many scans has a reason and no content."""
    image = Image.new("RGB", (64, 64), "teal")

    bomb = examine_image(scan_bomb(image, 20_000), "cat", None, EtlConfig())
    ordinary = examine_image(scan_bomb(image, 0), "cat", None, EtlConfig())

    assert (bomb["reason"], bomb["content"]) == ("too_many_parts", None)
    assert bomb["detail"] == "a JPEG of 4096 pixels with more than 100 scans"
    assert (ordinary["reason"], ordinary["width"]) == (None, 64)


UNPICKLE = """
import sys
from pathlib import Path

from pyspark.serializers import CloudPickleSerializer

from tasks.environment import module_to_preload  # as tasks/spark/python_daemon.py does

module_to_preload()
CloudPickleSerializer().loads(Path(sys.argv[1]).read_bytes())
"""


def test_python_workers_import_few_modules_of_this_project(tmp_path: Path) -> None:
    """Each worker of the ETL imports what its functions run, which has no part of the driver's work."""
    target, etl = part_target(tmp_path / "parts"), EtlConfig()
    edges = Edges.of(etl, pa.table({"label": ["cat"]}))
    readers = [make_reader(tmp_path, etl, target, edges), make_decoder(etl, target, edges)]
    functions = [*(make_row_writer(reader, target, READ_ARROW) for reader in readers), make_rewriter(target)]
    pickled = tmp_path / "functions.pickle"
    pickled.write_bytes(CloudPickleSerializer().dumps(functions))

    loaded = loaded_modules(UNPICKLE, tmp_path, str(pickled))

    assert len(loaded.own) <= 25, loaded.own
    assert not {"mlflow", "prefect", "torch", "deltalake", "duckdb"} & loaded.others
