"""Processing of files in Spark tasks: read, decode once, hash, scale down, choose the split."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image
from pyspark import Accumulator

from tasks.config.etl import EtlConfig
from tasks.model_package.decode import decode_sized, encode_jpeg, fit_within
from tasks.model_package.description import NEWEST, Decoding
from tasks.model_package.reasons import BadImage, Reason
from tasks.model_package.structure import MAX_PIXELS
from tasks.paths import GONE, is_inside
from tasks.refs import TEST, TRAIN, VAL
from tasks.schema import IMAGES, READ_ARROW
from tasks.spark.worker_log import EndedParts, WorkerCount, log_from_worker
from tasks.tables.parts import Mapper, PartTarget, PartWriter

STORED_QUALITY = 90
"""JPEG quality of images that are stored scaled down, on libjpeg's scale."""

MAX_FILE_BYTES = 256 << 20
"""Largest file that is read. A larger one cannot be an image within MAX_PIXELS, and could exhaust a worker's memory."""

VANISHED = "FileNotFoundException"
"""Java's exception for a file that was removed after it was listed."""


DEVIATIONS = 4
"""Half-width of an edge in standard deviations; the true edge lies outside in one of sixteen thousand cases."""


def draw_of(sha256: str, seed: int) -> float:
    """Return an image's position in the order in which images are assigned to splits, in [0, 1)."""
    return int(hashlib.sha256(f"{seed}:{sha256}".encode()).hexdigest()[:15], 16) / 16**15


def split_of(sha256: str, seed: int, val_fraction: float, test_fraction: float) -> str:
    """Return the split of an image as a function of its content and the seed only.

    Neither new images nor another partitioning move an image to another split, unlike with `randomSplit`.
    """
    draw = draw_of(sha256, seed)
    if draw < test_fraction:
        return TEST
    return VAL if draw < test_fraction + val_fraction else TRAIN


@dataclass(frozen=True)
class Edges:
    """Expected positions of the edges between splits in each class, near which the final split of an image may differ.

    A worker writes these images into separate parts. Otherwise nearly every part would be rewritten: of a thousand
    images, at least one usually gets another split.

    Attributes:
        seed: Seed of the split.
        cuts: Positions that follow from the fractions.
        sizes: Number of images to assign, by label.
    """

    seed: int
    cuts: tuple[float, float]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, etl: EtlConfig, listing: pa.Table) -> Self:
        """Return the edges for the listed files, under the assumption that all of them are valid images."""
        counts = pc.value_counts(listing["label"]).to_pylist()
        sizes = {found["values"]: found["counts"] for found in counts if found["values"] is not None}
        return cls(etl.split_seed, (etl.test_fraction, etl.test_fraction + etl.val_fraction), sizes)

    def has(self, sha256: str, label: str) -> bool:
        """Return whether an image is near an edge; the position of the k-th of n images varies as a binomial share."""
        draw, size = draw_of(sha256, self.seed), self.sizes[label]
        return any(
            0 < cut < 1 and abs(draw - cut) < DEVIATIONS * sqrt(cut * (1 - cut) / size) + 1 / size for cut in self.cuts
        )


def read_whole(file: Path, root: str) -> bytes:
    """Return the content of a file below `root`, the real path of the source, if it did not change meanwhile.

    Raises:
        OSError: The file is outside the source, changed while it was read, or is larger than MAX_FILE_BYTES.
    """
    if not is_inside(str(file), root):
        raise PermissionError("a symbolic link that points outside the source")
    with file.open("rb") as handle:
        before = os.fstat(handle.fileno())
        if before.st_size > MAX_FILE_BYTES:
            raise OSError(f"the file has more than {MAX_FILE_BYTES} bytes")
        content = handle.read()
        after = os.fstat(handle.fileno())
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, len(content)):
        raise OSError("the file changed while it was read")
    return content


def _missing_label(label: str | None, split: str | None, etl: EtlConfig) -> tuple[Reason, str] | None:
    """Return reason and detail if a file has no label or predefined split, else None."""
    if label is None:
        details = {
            "folder": "the file is not in a class folder",
            "pattern": "etl.labels.pattern finds no label in the path",
            "file": "etl.labels.file has no label for the path",
        }
        return Reason.LABEL_MISSING, details[etl.labels.by]
    if split is None and etl.split_by == "folder":
        return Reason.SPLIT_MISSING, "the file is not in one of the folders train, val and test"
    return None


def read_image(
    file: Path, label: str | None, split: str | None, root: str, etl: EtlConfig, known: str | None = None
) -> dict[str, Any]:
    """Read one file and return the row of `examine_image`.

    Args:
        file: The file.
        label: Its label.
        split: Its predefined split.
        root: Real path of the source.
        etl: Settings.
        known: sha256 of a content that need not be examined; the row has nothing but it then.
    """
    try:
        content = read_whole(file, root)
    except OSError as error:
        return _unreadable_row(split, str(error), may_be_there=error.errno not in GONE)
    if known is not None and hashlib.sha256(content).hexdigest() == known:
        return _empty_row(split) | {"sha256": known}
    return examine_image(content, label, split, etl)


def _empty_row(split: str | None) -> dict[str, Any]:
    names = ("sha256", "content", "width", "height", "dhash", "reason", "detail", "read_failed")
    return dict.fromkeys(names) | {"split": split}


def _unreadable_row(split: str | None, detail: str, *, may_be_there: bool) -> dict[str, Any]:
    return _empty_row(split) | {"reason": Reason.UNREADABLE.value, "detail": detail, "read_failed": may_be_there}


def examine_image(content: bytes, label: str | None, split: str | None, etl: EtlConfig) -> dict[str, Any]:
    """Return sha256, split, content, width, height and dhash, or the reason why a file is quarantined.

    `split` is the predefined one, or None if it follows from the content. With `stratified` splits, only the driver
    knows all images and makes the final assignment. The row then has the split that follows from the content, which is
    correct for most images.
    """
    row = _empty_row(split)
    row["sha256"] = hashlib.sha256(content).hexdigest()
    if missing := _missing_label(label, split, etl):
        return row | {"reason": missing[0].value, "detail": missing[1]}
    try:
        decoding = Decoding(version=etl.decode_version, sample_bits=etl.sample_bits)
        stored = store_image(content, etl.stored_side, etl.max_pixels, etl.min_side, decoding)
    except BadImage as bad:
        if bad.reason is Reason.UNREADABLE:  # Memory ran out: its image stays until a run decodes the file.
            return _unreadable_row(split, bad.detail, may_be_there=True)
        return row | {"reason": bad.reason.value, "detail": bad.detail}
    row["split"] = split or split_of(row["sha256"], etl.split_seed, etl.val_fraction, etl.test_fraction)
    return row | stored._asdict()


def dhash(image: Image.Image) -> int:
    """Return the difference hash of an image: 64 bits as a signed integer, since Spark has no unsigned integers.

    The image is averaged down to 9x8 gray cells; a bit is set if a cell is brighter than its left neighbour.
    Scaling, compression and brightness change few bits or none (Krawetz, "Kind of Like That", 2013).
    """
    cells = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX))
    bits = np.packbits(cells[:, 1:] > cells[:, :-1])
    return int.from_bytes(bits.tobytes(), "big", signed=True)


class StoredImage(NamedTuple):
    """An image as it is stored in the table `images`."""

    content: bytes
    width: int
    """Width of the original image after EXIF orientation, in pixels."""
    height: int
    """Height of the original image after EXIF orientation, in pixels."""
    dhash: int
    """64-bit perceptual hash of the image as it is stored, as a signed integer."""


def store_image(
    content: bytes,
    stored_side: int,
    max_pixels: int = MAX_PIXELS,
    min_side: int = 1,
    decoding: Decoding = NEWEST,
) -> StoredImage:
    """Return the image to store for the content of a file.

    The image is always decoded, since only decoding detects damage. If no side exceeds `stored_side`, its bytes are
    stored unchanged.

    Raises:
        BadImage: The bytes are not a usable image.
    """
    image, (width, height) = decode_sized(content, max_pixels, stored_side, min_side, decoding)
    if max(width, height) > stored_side:
        image = fit_within(image, stored_side)
        # No chroma subsampling: it would be subsampled a second time when the image is scaled down later.
        content = encode_jpeg(image, STORED_QUALITY, "4:4:4")
    # The hash of the scaled image differs in a few bits at most, and takes a third of the time.
    return StoredImage(content, width, height, dhash(image))


def make_reader(
    source: Path,
    etl: EtlConfig,
    target: PartTarget,
    edges: Edges | None = None,
    ended: Accumulator[EndedParts] | None = None,
) -> Mapper:
    """Return the function for `mapInArrow` that maps batches of TO_READ_ARROW to batches of READ_ARROW.

    The images are written into parts of `target`, those near an edge between two splits into separate parts.
    `ended` counts the tasks that end.
    """
    driver = os.getpid()

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        root = os.path.realpath(source)

        def examine(listed: dict[str, Any]) -> dict[str, Any]:
            file, known = source / listed["path"], listed["ledger_sha256"]
            return read_image(file, listed["label"], listed["split"], root, etl, known)

        return _examine_all(batches, examine, target, edges, WorkerCount("etl", driver, ended))

    return read


def make_decoder(
    etl: EtlConfig, target: PartTarget, edges: Edges | None = None, ended: Accumulator[EndedParts] | None = None
) -> Mapper:
    """Return the function for `mapInArrow` for files that Spark has read; otherwise as `make_reader`.

    It maps batches of TO_READ_ARROW plus the columns content and unreadable (the reason if the content is null) to
    batches of READ_ARROW.
    """

    def examine(listed: dict[str, Any]) -> dict[str, Any]:
        content, unreadable = listed.pop("content"), listed.pop("unreadable")
        if unreadable is not None:
            return _unreadable_row(listed["split"], unreadable, may_be_there=not unreadable.startswith(VANISHED))
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
    """Yield the rows after all parts are closed, so that every part that a row names can be read."""
    rows: list[dict[str, Any]] = []
    with PartWriter(target) as inner_writer, PartWriter(target) as edge_writer:
        for batch in batches:
            for listed in batch.to_pylist():
                count.add(1)
                row = listed | examine(listed)  # make_decoder removes columns of `listed` that the row must not have
                row["part"] = None
                if row["content"]:
                    is_near_edge = edges is not None and edges.has(row["sha256"], row["label"])
                    writer = edge_writer if is_near_edge else inner_writer
                    row["part"] = writer.add({name: row.get(name) for name in IMAGES.names})
                rows.append({name: row[name] for name in READ_ARROW.names})
    count.close()
    if rows:
        num_bad = sum(row["reason"] is not None for row in rows)
        log_from_worker(f"read {len(rows)} files, {num_bad} of them unusable")
        yield pa.RecordBatch.from_pylist(rows, schema=READ_ARROW)
