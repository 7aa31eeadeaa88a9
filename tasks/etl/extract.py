"""What a Spark task does with the files it is given: read, decode once, hash, scale down, choose the split."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.etl.decode import BadImage, Reason, decode_sized, encode_jpeg, fit_within
from tasks.schema import READ_ARROW, TEST, TRAIN, VAL
from tasks.worker_log import say

BATCH_BYTES = 16 << 20
"""Content that one Arrow batch to Spark carries at most, plus one picture: bounds a worker's memory."""


def split_of(sha256: str, seed: int, val_fraction: float, test_fraction: float) -> str:
    """Return the split of a picture, a function of its content and the seed alone.

    Adding pictures moves none, and neither does another partitioning (as `randomSplit` would).
    """
    draw = int(hashlib.sha256(f"{seed}:{sha256}".encode()).hexdigest()[:15], 16) / 16**15
    if draw < test_fraction:
        return TEST
    return VAL if draw < test_fraction + val_fraction else TRAIN


def _inside(path: str, root: str) -> bool:
    return os.path.realpath(path).startswith(root + os.sep)


def read_picture(file: Path, label: str | None, root: str, stored_side: int, max_pixels: int) -> dict[str, Any]:
    """Read one file; return sha256, content, width, height, or the reason why it is quarantined."""
    row: dict[str, Any] = {
        "sha256": None,
        "content": None,
        "width": None,
        "height": None,
        "reason": None,
        "detail": None,
    }
    try:
        if not _inside(str(file), root):
            raise PermissionError("a link that leads out of the source")
        content = file.read_bytes()
    except OSError as error:
        return row | {"reason": Reason.UNREADABLE.value, "detail": str(error)}
    row["sha256"] = hashlib.sha256(content).hexdigest()
    if label is None:
        return row | {"reason": Reason.LABEL_MISSING.value, "detail": "the file lies in no class folder"}
    try:
        content, width, height = store_picture(content, stored_side, max_pixels)
    except BadImage as bad:
        return row | {"reason": bad.reason.value, "detail": bad.detail}
    return row | {"content": content, "width": width, "height": height}


def store_picture(content: bytes, stored_side: int, max_pixels: int) -> tuple[bytes, int, int]:
    """Return what is stored of a file, and the picture's own width and height in pixels.

    Decoded in any case, since only that finds damage; the bytes stay as they are where no side exceeds `stored_side`.

    Raises:
        BadImage: The bytes are no usable image.
    """
    image, (width, height) = decode_sized(content, max_pixels, box=stored_side)
    if max(width, height) > stored_side:
        content = encode_jpeg(fit_within(image, stored_side))
    return content, width, height


def make_reader(
    source: Path, stored_side: int, max_pixels: int, seed: int, val_fraction: float, test_fraction: float
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow`: batches of LISTING_ARROW in, batches of READ_ARROW out."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        root = os.path.realpath(source)
        rows: list[dict[str, Any]] = []
        held = num_read = num_bad = 0
        for batch in batches:
            for listed in batch.to_pylist():
                row = listed | read_picture(source / listed["path"], listed["label"], root, stored_side, max_pixels)
                row["split"] = split_of(row["sha256"], seed, val_fraction, test_fraction) if row["content"] else None
                rows.append(row)
                num_read += 1
                num_bad += row["reason"] is not None
                held += len(row["content"] or b"")
                if held >= BATCH_BYTES:
                    yield pa.RecordBatch.from_pylist(rows, schema=READ_ARROW)
                    rows, held = [], 0
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=READ_ARROW)
        if num_read:
            say(f"read {num_read} files, {num_bad} of them unusable")

    return read
