"""The images of the loader benchmark as caches, JPEG files, Parquet files and MDS shards."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tasks.cache.write import FILE_BYTES, rows_per_group
from tasks.config.cache import CacheConfig
from tasks.model_package.decode import encode_jpeg
from tasks.refs import CacheRef
from tests.builders import caches

SIDE = 224
QUALITY = 90
CLASSES = tuple(f"class{number}" for number in range(10))
RECIPE_GROUPS = 64
"""Row groups of the recipe's Parquet; with fewer than its reader prefetches, the reader may end without a batch."""


def draw_image(number: int) -> npt.NDArray[np.uint8]:
    """Return a gradient with noise, of about 20 kB as JPEG like a photo of this size."""
    draw = np.random.default_rng(number)
    ramp = np.linspace(-60, 60, SIDE)
    slopes = draw.uniform(-1, 1, (2, 3))
    gradient = 128 + ramp[:, None, None] * slopes[0] + ramp[None, :, None] * slopes[1]
    return np.clip(gradient + draw.normal(0, 11, (SIDE, SIDE, 1)), 0, 255).astype(np.uint8)


def write_cache(url: str, splits: dict[str, int], pixel_format: str) -> CacheRef:
    """Write a cache with these image counts per split by the code of the Spark tasks, without Spark."""
    settings = CacheConfig.model_validate({"image_size": SIDE, "format": pixel_format, "jpeg_quality": QUALITY})
    in_group = rows_per_group(splits["train"], settings)
    return caches.write_cache(
        url,
        splits,
        lambda split, row: (draw_image(row), row % len(CLASSES)),
        CLASSES,
        settings,
        rows_per_group=in_group,
        groups_per_file=max(1, FILE_BYTES // (in_group * settings.pixel_bytes)),
    )


def encoded(num_rows: int) -> Iterator[tuple[bytes, int]]:
    """Yield the JPEG files of the cache of format jpeg, with their classes."""
    for row in range(num_rows):
        yield encode_jpeg(Image.fromarray(draw_image(row)), QUALITY, "4:2:0"), row % len(CLASSES)


def write_image_folder(folder: Path, num_rows: int) -> None:
    """Write JPEG files into class folders."""
    for row, (content, label) in enumerate(encoded(num_rows)):
        file = folder / CLASSES[label] / f"{row}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def write_recipe(folder: Path, num_rows: int) -> None:
    """Write Parquet files with one JPEG per row, like those of the recipe's converter."""
    folder.mkdir(parents=True)
    rows = list(encoded(num_rows))
    in_group = max(1, num_rows // RECIPE_GROUPS)
    for number, begin in enumerate(range(0, num_rows, -(-num_rows // 4))):
        part = rows[begin : begin + -(-num_rows // 4)]
        table = pa.table(
            {"content": [content for content, _label in part], "label": [label for _content, label in part]}
        )
        pq.write_table(table, folder / f"part-{number:05d}.parquet", compression="none", row_group_size=in_group)


def write_mds(folder: Path, num_rows: int) -> None:
    """Write raw and JPEG shards for MosaicML Streaming; runs in the environment of that package."""
    from streaming import MDSWriter

    with (
        MDSWriter(out=str(folder / "raw"), columns={"pixels": f"ndarray:uint8:{SIDE},{SIDE},3", "label": "int"}) as raw,
        MDSWriter(out=str(folder / "jpeg"), columns={"pixels": "jpeg", "label": "int"}) as jpeg,
    ):
        for row, (content, label) in enumerate(encoded(num_rows)):
            raw.write({"pixels": draw_image(row), "label": label})
            jpeg.write({"pixels": Image.open(io.BytesIO(content)), "label": label})
