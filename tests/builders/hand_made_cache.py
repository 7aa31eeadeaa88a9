"""A cache of the tests' images, written without Spark."""

from pathlib import Path

from tasks.config.cache import CacheConfig
from tasks.model_package.decode import decode_pixels
from tasks.refs import CacheRef
from tests.builders.caches import write_cache

SIDE = 24


def hand_made_cache(source: Path, url: str) -> CacheRef:
    """Write a cache of 60 images: 39 in train, 11 in val and 10 in test, in row groups of 4."""
    files = sorted(source.glob("*/*.png"), key=lambda file: (file.name, file.parent.name))
    classes = ("blue", "green", "red")
    parts = {"train": files[:39], "val": files[39:50], "test": files[50:]}
    return write_cache(
        url,
        {split: len(part) for split, part in parts.items()},
        lambda split, row: (
            decode_pixels(parts[split][row].read_bytes(), SIDE),
            classes.index(parts[split][row].parent.name),
        ),
        classes,
        CacheConfig(image_size=SIDE),
        rows_per_group=4,
        groups_per_file=10,
    )
