"""Caches written without Spark, by the code that Spark tasks run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tasks.cache.manifest import FORMAT, CacheManifest, CacheSplit, write_manifest
from tasks.cache.write import RowFileWriter
from tasks.cache.write_images import encode_pixels, image_schema
from tasks.config.cache import CacheConfig
from tasks.refs import CacheRef, TableRef

Pixels = npt.NDArray[np.uint8]


def noise(row: int, side: int) -> Pixels:
    """Return random pixels seeded with the row number, uint8 (side, side, 3)."""
    return np.random.default_rng(row).integers(0, 256, (side, side, 3), dtype=np.uint8)


class Draw(Protocol):
    """Callable that returns pixels (uint8, HWC) and label index of a row of a split."""

    def __call__(self, split: str, row: int) -> tuple[Pixels, int]:
        """Return pixels and label index."""


def write_cache(
    url: str,
    rows: Mapping[str, int],
    draw: Draw,
    classes: Sequence[str],
    settings: CacheConfig,
    *,
    rows_per_group: int,
    groups_per_file: int,
) -> CacheRef:
    """Write a complete cache of `rows` images per split."""
    Path(url).mkdir(parents=True)
    rows_per_file = rows_per_group * groups_per_file
    splits = {}
    for split, num_rows in rows.items():
        files = []
        for number, begin in enumerate(range(0, num_rows, rows_per_file)):
            writer = RowFileWriter(url, split, number, image_schema(settings), rows_per_group)
            for row in range(begin, min(num_rows, begin + rows_per_file)):
                pixels, label = draw(split, row)
                writer.add(encode_pixels(pixels, settings), label, row)
            files.append(writer.close())
        splits[split] = CacheSplit(rows=num_rows, rows_per_group=rows_per_group, files=tuple(files))
    manifest = CacheManifest(
        format=FORMAT,
        table=TableRef(path="/tables/images", version=3),
        content_digest="content",
        settings=settings,
        classes=tuple(classes),
        splits=splits,
    )
    return write_manifest(url, manifest)
