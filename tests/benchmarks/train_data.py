"""The images of the training benchmarks as a cache, as JPEG files in class folders and as Parquet."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tasks.cache.write import FILE_BYTES, rows_per_group
from tasks.config.cache import CacheConfig
from tasks.model_package.decode import decode_pixels, encode_jpeg
from tests.benchmarks import loader_data
from tests.builders import caches

SIDE = loader_data.SIDE


def write_noise(folder: Path, num_rows: int) -> None:
    """Write generated images of 10 classes as a cache with three splits, and as files."""
    splits = {"train": num_rows, "val": num_rows // 10, "test": num_rows // 10}
    loader_data.write_cache(str(folder / "uint8"), splits, "uint8")
    loader_data.write_image_folder(folder / "files", num_rows)


def split_of(content: bytes) -> str:
    """Return the split of an image by its content: 80 % train, 10 % val, 10 % test."""
    share = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
    return "val" if share < 0.1 else "test" if share < 0.2 else "train"


def write_photos(source: Path, folder: Path) -> None:
    """Write the photos in class folders as our cache, and as the recipe's Parquet of JPEG files of the same pixels."""
    classes = sorted(path.name for path in source.iterdir() if path.is_dir())
    rows: dict[str, list[tuple[Path, int]]] = {"train": [], "val": [], "test": []}
    for label, name in enumerate(classes):
        for file in sorted((source / name).iterdir()):
            rows[split_of(file.read_bytes())].append((file, label))
    for part in rows.values():
        # Sorted by content, as in a cache: neighbours are of different classes.
        part.sort(key=lambda row: hashlib.sha256(row[0].read_bytes()).hexdigest())
    settings = CacheConfig(image_size=SIDE)
    in_group = rows_per_group(len(rows["val"]), settings)
    caches.write_cache(
        str(folder / "uint8"),
        {split: len(part) for split, part in rows.items()},
        lambda split, row: (decode_pixels(rows[split][row][0].read_bytes(), SIDE), rows[split][row][1]),
        classes,
        settings,
        rows_per_group=in_group,
        groups_per_file=max(1, FILE_BYTES // (in_group * settings.pixel_bytes)),
    )
    (folder / "classes.json").write_text(json.dumps(classes))
    for split in ("train", "val"):
        target = folder / "recipe" / split
        target.mkdir(parents=True)
        contents = [
            encode_jpeg(Image.fromarray(np.asarray(decode_pixels(file.read_bytes(), SIDE))), 95, "4:2:0")
            for file, _label in rows[split]
        ]
        table = pa.table({"content": contents, "label": [label for _file, label in rows[split]]})
        groups = max(1, len(contents) // loader_data.RECIPE_GROUPS)
        pq.write_table(table, target / "part-00000.parquet", compression="none", row_group_size=groups)


def home_of(folder: Path, seed: int) -> Path:
    """Return the home of a training run, whose MLflow database exists since the cache was made."""
    return folder / f"home-{seed}"
