"""Source files of the rows of a cache, for messages and tables."""

from collections.abc import Sequence

from tasks.cache.manifest import CacheManifest
from tasks.errors import join_names
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables import snapshots

NUM_NAMED = 8
"""Maximum number of images that a message names."""


def image_files(manifest: CacheManifest, split: str, rows: Sequence[int], storage: Storage) -> list[str] | None:
    """Return the path in the source of each row, or its sha256 if no file has this content any more.

    Returns None if only Spark can read the tables, or if their version no longer exists.
    """
    try:
        images = snapshots.read_columns(None, manifest.table, IMAGE_KEYS_ARROW, {"split": split})
        ledger = snapshots.read_columns(None, snapshots.latest(None, storage.table("files")), FILES_ARROW)
    except (NeedsSpark, OSError, ValueError):
        return None
    # The images of a split are sorted by sha256 in the cache.
    hashes = sorted(images["sha256"].to_pylist())
    wanted = [hashes[row] for row in rows]
    paths: dict[str, str] = {}
    for path, sha256 in sorted(zip(ledger["path"].to_pylist(), ledger["sha256"].to_pylist(), strict=True)):
        paths.setdefault(sha256, path)
    return [paths.get(sha256, sha256) for sha256 in wanted]


def name_images(manifest: CacheManifest, split: str, rows: list[int], storage: Storage) -> str:
    """Return a text with the files of the rows, of many rows the first; if they are unknown, with the row numbers."""
    shown = rows[:NUM_NAMED]
    files = image_files(manifest, split, shown, storage)
    if files is None:
        return f"rows {join_names([str(row) for row in shown], len(rows))} of the split '{split}' in the cache"
    return join_names(files, len(rows))
