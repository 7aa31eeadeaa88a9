"""How large the parts of a cache are, and whether a disk has room for it."""

import shutil

from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.system.disk import existing_folder

FILE_BYTES = 64 << 20
"""Size of one cache file, so that many tasks write and many ranks read at once."""

FEATURE_GROUP_BYTES = 4 << 20
"""Size of a row group of features."""

MIN_ROW_GROUPS = 64
"""Row groups a split is cut into at least, where it has the rows: room for shuffling, and for as many ranks."""

JPEG_SHARE = 0.25
"""A JPEG image's bytes beside its pixels', taken for the disk space needed: photos take 0.1, noisy ones more."""


def rows_in_group(rows: int, row_bytes: int, group_bytes: int) -> int:
    """Return how many of a split's rows a row group has: bounded by its size, and few enough for MIN_ROW_GROUPS."""
    return max(1, min(group_bytes // row_bytes, rows // MIN_ROW_GROUPS))


def rows_per_group(rows: int, cache: CacheConfig) -> int:
    """Return how many of a split's images a row group has."""
    return rows_in_group(rows, cache.pixel_bytes, cache.row_group_megabytes << 20)


def cache_bytes(rows: int, cache: CacheConfig) -> int:
    """Return about how many bytes the cache of `rows` images takes, padding included."""
    image_bytes = cache.pixel_bytes * (1 if cache.format == "uint8" else JPEG_SHARE)
    return int(rows * image_bytes * (1 + 1 / MIN_ROW_GROUPS)) + (1 << 20)


def check_disk(url: str, needed: int, smaller: str = "lower cache.image_size") -> None:
    """Refuse a cache that the disk cannot hold.

    Args:
        url: Where it is to be; the folder need not be there.
        needed: Its bytes.
        smaller: What a person can set so that less is needed.

    Raises:
        WrongInput: Says how much is needed and how much is free.
    """
    folder = existing_folder(url)
    if folder is None:
        return
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WrongInput(
            f"the cache in '{url}' needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
            f"make room, {smaller}, or set storage.cache to another disk"
        )
