"""Sizes of a cache and its row groups, and the check of the disk space."""

import shutil

from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.system.disk import existing_folder

FILE_BYTES = 64 << 20
"""Size of one cache file, small enough for many tasks to write and many ranks to read in parallel."""

FEATURE_GROUP_BYTES = 4 << 20
"""Size of a row group of features."""

MIN_ROW_GROUPS = 64
"""Minimum number of row groups of a split with as many rows, for shuffling and for as many ranks."""

JPEG_SHARE = 0.25
"""Size of a JPEG image relative to its pixels, for the estimate of the disk space: photos take 0.1, noisy ones more."""


def rows_in_group(rows: int, row_bytes: int, group_bytes: int) -> int:
    """Return the number of rows per row group of a split: bounded by its size, and few enough for MIN_ROW_GROUPS."""
    return max(1, min(group_bytes // row_bytes, rows // MIN_ROW_GROUPS))


def rows_per_group(rows: int, cache_config: CacheConfig) -> int:
    """Return the number of images per row group of a split."""
    return rows_in_group(rows, cache_config.pixel_bytes, cache_config.row_group_megabytes << 20)


def cache_bytes(rows: int, cache_config: CacheConfig) -> int:
    """Return an estimate of the bytes of the cache of `rows` images, including padding."""
    image_bytes = cache_config.pixel_bytes * (1 if cache_config.format == "uint8" else JPEG_SHARE)
    return int(rows * image_bytes * (1 + 1 / MIN_ROW_GROUPS)) + (1 << 20)


def check_disk(url: str, needed: int, smaller: str = "lower cache.image_size") -> None:
    """Check that the disk has room for a cache.

    Args:
        url: Folder or URL of the cache; the folder need not exist.
        needed: Size of the cache in bytes.
        smaller: The setting to change for a smaller cache, as it is named in the error message.

    Raises:
        WrongInput: It has not; the message gives the space needed and the space that is free.
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


def rows_per_file(group_rows: int, cache_config: CacheConfig) -> int:
    """Return the number of images per file, in row groups of `group_rows` images."""
    return max(1, FILE_BYTES // (group_rows * cache_config.pixel_bytes)) * group_rows
