"""What a Spark task does with the files it is given: read, decode once, hash, scale down, choose the split."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import Accumulator

from tasks.config.etl import EtlConfig
from tasks.decode import MAX_PIXELS, BadImage, Reason, decode_sized, encode_jpeg, fit_within
from tasks.etl.edges import Edges, draw_of
from tasks.etl.near_duplicates import dhash
from tasks.paths import is_inside
from tasks.schema import IMAGES, READ_ARROW, TEST, TRAIN, VAL
from tasks.spark.progress import EndedParts
from tasks.spark.worker_log import WorkerCount, say
from tasks.tables.parts import PartTarget, PartWriter
from tasks.tables.rewriting import Mapper

STORED_QUALITY = 90
"""Of images that are stored scaled down, on libjpeg's scale."""

MAX_FILE_BYTES = 256 << 20
"""A larger file is not read: it is no image within MAX_PIXELS, and would take a worker's memory."""


def split_of(sha256: str, seed: int, val_fraction: float, test_fraction: float) -> str:
    """Return the split of an image, a function of its content and the seed alone.

    Adding images moves none, and neither does another partitioning (as `randomSplit` would).
    """
    draw = draw_of(sha256, seed)
    if draw < test_fraction:
        return TEST
    return VAL if draw < test_fraction + val_fraction else TRAIN


def _read_whole(file: Path) -> bytes:
    """Return the content of a file that nobody wrote to meanwhile: halves of two images are none.

    Raises:
        OSError: It changed; what it is now, the next run reads. Or it is too large.
    """
    with file.open("rb") as handle:
        before = os.fstat(handle.fileno())
        if before.st_size > MAX_FILE_BYTES:
            raise OSError(f"the file has more than {MAX_FILE_BYTES} bytes")
        content = handle.read()
        after = os.fstat(handle.fileno())
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, len(content)):
        raise OSError("the file changed while it was read")
    return content


def _unlabelled(label: str | None, split: str | None, etl: EtlConfig) -> tuple[Reason, str] | None:
    """Return the reason and detail why a file, whatever its content, cannot be used, or None."""
    if label is None:
        details = {
            "folder": "the file lies in no class folder",
            "pattern": "etl.labels.pattern finds no label in the path",
            "file": "etl.labels.file names no label for the path",
        }
        return Reason.LABEL_MISSING, details[etl.labels.by]
    if split is None and etl.split_by == "folder":
        return Reason.SPLIT_MISSING, "the file lies in none of the folders train, val and test"
    return None


def read_image(file: Path, label: str | None, split: str | None, root: str, etl: EtlConfig) -> dict[str, Any]:
    """Read one file and examine it as `examine_image`; `root` is the source's real path."""
    try:
        if not is_inside(str(file), root):
            raise PermissionError("a link that leads out of the source")
        content = _read_whole(file)
    except OSError as error:
        return _unreadable(split, str(error))
    return examine_image(content, label, split, etl)


def _nothing(split: str | None) -> dict[str, Any]:
    names = ("sha256", "content", "width", "height", "dhash", "reason", "detail")
    return dict.fromkeys(names) | {"split": split}


def _unreadable(split: str | None, detail: str) -> dict[str, Any]:
    return _nothing(split) | {"reason": Reason.UNREADABLE.value, "detail": detail}


def examine_image(content: bytes, label: str | None, split: str | None, etl: EtlConfig) -> dict[str, Any]:
    """Return sha256, split, content, width, height and dhash, or the reason why a file is quarantined.

    `split` is the predefined one, or None where the content decides. Where images are dealt (`stratified`) only the
    driver knows all of them: the split is the one that the content would give, which is right of most images.
    """
    row = _nothing(split)
    row["sha256"] = hashlib.sha256(content).hexdigest()
    if unlabelled := _unlabelled(label, split, etl):
        return row | {"reason": unlabelled[0].value, "detail": unlabelled[1]}
    try:
        stored = store_image(content, etl.stored_side, etl.max_pixels, etl.min_side)
    except BadImage as bad:
        return row | {"reason": bad.reason.value, "detail": bad.detail}
    row["split"] = split or split_of(row["sha256"], etl.split_seed, etl.val_fraction, etl.test_fraction)
    return row | stored._asdict()


class StoredImage(NamedTuple):
    """What is stored of an image."""

    content: bytes
    width: int
    """Of the file's own image, upright, in pixels; so is height."""
    height: int
    dhash: int
    """64-bit perceptual hash of the image as it is stored, as a signed integer."""


def store_image(content: bytes, stored_side: int, max_pixels: int = MAX_PIXELS, min_side: int = 1) -> StoredImage:
    """Return what is stored of a file.

    Decoded in any case, since only that finds damage; the bytes stay as they are where no side exceeds `stored_side`.

    Raises:
        BadImage: The bytes are no usable image.
    """
    image, (width, height) = decode_sized(content, max_pixels, stored_side, min_side)
    if max(width, height) > stored_side:
        image = fit_within(image, stored_side)
        # Whole chroma: half of it would be lost a second time where the image is scaled down later.
        content = encode_jpeg(image, STORED_QUALITY, "4:4:4")
    # Of the scaled image, a few bits at most are others, and it costs a third.
    return StoredImage(content, width, height, dhash(image))


def make_reader(
    source: Path,
    etl: EtlConfig,
    target: PartTarget,
    edges: Edges | None = None,
    ended: Accumulator[EndedParts] | None = None,
) -> Mapper:
    """Return the function for `mapInArrow`: batches of LISTING_ARROW in, batches of READ_ARROW out.

    The images themselves go into parts of `target`, those near an edge of two splits into parts of their own.
    `ended` is told of each task that ends.
    """
    driver = os.getpid()

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        root = os.path.realpath(source)

        def examine(listed: dict[str, Any]) -> dict[str, Any]:
            return read_image(source / listed["path"], listed["label"], listed["split"], root, etl)

        return _examine_all(batches, examine, target, edges, WorkerCount("etl", driver, ended))

    return read


def make_decoder(
    etl: EtlConfig, target: PartTarget, edges: Edges | None = None, ended: Accumulator[EndedParts] | None = None
) -> Mapper:
    """Return the function for `mapInArrow` where Spark did the reading, otherwise as `make_reader`.

    Batches of LISTING_ARROW with the columns content and unreadable (why there is none) in, of READ_ARROW out.
    """

    def examine(listed: dict[str, Any]) -> dict[str, Any]:
        content, unreadable = listed.pop("content"), listed.pop("unreadable")
        if unreadable is not None:
            return _unreadable(listed["split"], unreadable)
        return examine_image(content, listed["label"], listed["split"], etl)

    driver = os.getpid()
    return lambda batches: _examine_all(batches, examine, target, edges, WorkerCount("etl", driver, ended))


def _examine_all(
    batches: Iterator[pa.RecordBatch],
    examine: Callable[[dict[str, Any]], dict[str, Any]],
    target: PartTarget,
    edges: Edges | None,
    count: WorkerCount,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows once all parts are closed: what Spark knows of an image, it can read."""
    rows: list[dict[str, Any]] = []
    with PartWriter(target) as sure, PartWriter(target) as unsure:
        for batch in batches:
            for listed in batch.to_pylist():
                count.add(1)
                row = listed | examine(listed)  # it takes from `listed` what goes no further
                row["part"] = None
                if row["content"]:
                    writer = unsure if edges is not None and edges.has(row["sha256"], row["label"]) else sure
                    row["part"] = writer.add({name: row.get(name) for name in IMAGES.names})
                rows.append({name: row[name] for name in READ_ARROW.names})
    count.close()
    if rows:
        num_bad = sum(row["reason"] is not None for row in rows)
        say(f"read {len(rows)} files, {num_bad} of them unusable")
        yield pa.RecordBatch.from_pylist(rows, schema=READ_ARROW)
