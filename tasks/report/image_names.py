"""From rows of a cache back to the files of the source, for a person who wants to look at them."""

from collections.abc import Sequence

from tasks.cache.manifest import CacheManifest
from tasks.errors import listed
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables import snapshots

NUM_NAMED = 8
"""Images that are named; a batch of a thousand helps nobody."""


def image_files(manifest: CacheManifest, split: str, rows: Sequence[int], storage: Storage) -> list[str] | None:
    """Return the file of each row, as its path in the source, or its sha256 where no file has the content any more.

    Tables that only Spark can read are not asked, nor are versions that are gone: then it is None.
    """
    try:
        images = snapshots.read_columns(None, manifest.table, IMAGE_KEYS_ARROW, {"split": split})
        ledger = snapshots.read_columns(None, snapshots.latest(None, storage.table("files")), FILES_ARROW)
    except (NeedsSpark, OSError, ValueError):
        return None
    # The cache orders the images of a split by sha256.
    hashes = sorted(images["sha256"].to_pylist())
    wanted = [hashes[row] for row in rows]
    paths: dict[str, str] = {}
    for path, sha256 in sorted(zip(ledger["path"].to_pylist(), ledger["sha256"].to_pylist(), strict=True)):
        paths.setdefault(sha256, path)
    return [paths.get(sha256, sha256) for sha256 in wanted]


def name_images(manifest: CacheManifest, split: str, rows: list[int], storage: Storage) -> str:
    """Say which files the rows are, of many the first; where they are not known, it is rows that are named."""
    shown = rows[:NUM_NAMED]
    files = image_files(manifest, split, shown, storage)
    if files is None:
        return f"rows {listed([str(row) for row in shown], len(rows))} of the split '{split}' in the cache"
    return listed(files, len(rows))
