"""From rows of a cache back to the files of the source, for a person who wants to look at them."""

from tasks.cache.manifest import CacheManifest
from tasks.etl import snapshots
from tasks.schema import FILES_ARROW, HELD_ARROW
from tasks.spark import NeedsSpark
from tasks.storage import Storage

NUM_NAMED = 8
"""Pictures that are named; a batch of a thousand helps nobody."""


def name_pictures(manifest: CacheManifest, split: str, rows: list[int], storage: Storage) -> str:
    """Say which files the rows are, by their paths in the source, or by sha256 where no file has the content any more.

    Tables that only Spark can read are not asked, nor are versions that are gone: then it is rows that are named.
    """
    shown = rows[:NUM_NAMED]
    more = f" and {len(rows) - NUM_NAMED} more" if len(rows) > NUM_NAMED else ""
    try:
        images = snapshots.read_columns(None, manifest.table, HELD_ARROW, {"split": split})
        ledger = snapshots.read_columns(None, snapshots.latest(None, storage.table("files")), FILES_ARROW)
    except (NeedsSpark, OSError, ValueError):
        return f"rows {', '.join(map(str, shown))}{more} of the split '{split}' in the cache"
    # The cache orders the pictures of a split by sha256.
    hashes = sorted(images["sha256"].to_pylist())
    wanted = [hashes[row] for row in shown]
    paths: dict[str, str] = {}
    for path, sha256 in sorted(zip(ledger["path"].to_pylist(), ledger["sha256"].to_pylist(), strict=True)):
        paths.setdefault(sha256, path)
    return f"{', '.join(paths.get(sha256, sha256) for sha256 in wanted)}{more}"
