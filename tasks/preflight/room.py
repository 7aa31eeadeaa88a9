"""Whether the disk has room for the cache that a run of the DAG has still to write."""

import glob
import shutil

import fsspec

from tasks.cache.manifest import MANIFEST, read_manifest, whole_cache
from tasks.cache.sizes import cache_bytes, check_disk
from tasks.config import CacheConfig, EtlConfig
from tasks.disk import existing_folder
from tasks.etl import delta, snapshots
from tasks.etl.outcomes import Comparison
from tasks.etl.relations import Relations
from tasks.etl.settings import check_properties, source_property, table_properties
from tasks.etl.source import Source
from tasks.refs import TableRef
from tasks.schema import FILES_ARROW, HELD_ARROW
from tasks.spark import NeedsSpark
from tasks.storage import Storage


def check_room(etl: EtlConfig, cache: CacheConfig, source: Source, storage: Storage) -> None:
    """Refuse a run whose cache the disk cannot hold; one that is there already needs no room.

    Raises:
        WrongInput: Says how much is needed and how much is free.
    """
    needed = cache_bytes(source.listing.num_rows, cache)
    folder = existing_folder(storage.cache)
    # Comparing the source with the tables takes seconds where they are large: only where the answer matters.
    if folder is None or needed <= shutil.disk_usage(folder).free:
        return
    if not _is_cached(etl, cache, source, storage):
        check_disk(storage.cache, needed)


def _is_cached(etl: EtlConfig, cache: CacheConfig, source: Source, storage: Storage) -> bool:
    """Return whether the source has nothing new and there is a whole cache of what the table holds.

    False as well where only Spark can tell: of tables in an object store.
    """
    try:
        images = _unchanged_images(etl, source, storage)
    except NeedsSpark:
        return False
    return images is not None and _has_cache(images, cache, storage)


def _unchanged_images(etl: EtlConfig, source: Source, storage: Storage) -> TableRef | None:
    """Return the newest version of `images` if no file was added, changed or removed since, or else None.

    Files that ETL reads again in every run, such as those without permission, are taken to be as they were.
    """
    rows, refs = {}, []
    for name, schema in (("images", HELD_ARROW), ("files", FILES_ARROW)):
        path = storage.table(name)
        snapshot = snapshots.newest_snapshot(None, path)
        if snapshot is None:
            return None
        wanted = table_properties(etl, source_property(source.location, storage.digits, snapshot.properties))
        if check_properties(snapshot.properties, wanted, path, etl.replace_source):
            return None
        rows[name] = snapshots.read_columns(None, snapshot.table, schema)
        refs.append(snapshot.table)
    with Relations(storage) as relations:
        keep = etl.deleted == "keep"
        Comparison(relations, source.listing, rows["files"], rows["images"], replaced=False, keep_deleted=keep)
        changed = relations.rows("SELECT count(*) FROM compared WHERE status IN ('new', 'gone')")[0][0]
    return None if changed else refs[0]


def _has_cache(images: TableRef, cache: CacheConfig, storage: Storage) -> bool:
    """Return whether a whole cache is there of this version, or of an earlier one with the same rows."""
    filesystem, root = fsspec.core.url_to_fs(storage.cache)
    for path in filesystem.glob(f"{glob.escape(root)}/[!.]*/{MANIFEST}"):
        url = f"{storage.cache.rstrip('/')}/{path.split('/')[-2]}"
        manifest = read_manifest(url)
        if manifest is None or (manifest.table.path, manifest.table.table_id) != (images.path, images.table_id):
            continue
        # Maintenance makes versions, too, and changes no row.
        if not delta.rows_changed_since(images.path, manifest.table.version) and whole_cache(url, cache):
            return True
    return False
