"""Whether the disk has room for the cache that a run of the DAG has still to write."""

import glob
import logging
import shutil

import fsspec

from tasks.cache.manifest import MANIFEST, read_manifest, whole_cache
from tasks.cache.sizes import cache_bytes, check_disk
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.etl.outcomes import Comparison
from tasks.etl.source import Source
from tasks.paths import resolved
from tasks.refs import TableRef
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.disk import existing_folder
from tasks.tables import delta, snapshots
from tasks.tables.properties import check_properties, continued, source_property, table_properties
from tasks.tables.relations import Relations

logger = logging.getLogger("lakevision.preflight")


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
    try:
        images = _unchanged_images(etl, source, storage)
    except NeedsSpark:
        # Building the cache checks the disk as well, and a guess here would end runs that have their cache.
        logger.info("only Spark can read the tables in %s: the disk is checked when a cache is built", storage.tables)
        return
    if images is None or not _has_cache(images, cache, storage):
        check_disk(storage.cache, needed)


def _unchanged_images(etl: EtlConfig, source: Source, storage: Storage) -> TableRef | None:
    """Return the newest version of `images` if no file was added, changed or removed since, or else None.

    Files that ETL reads again in every run, such as those without permission, are taken to be as they were.
    """
    schemas = {"images": IMAGE_KEYS_ARROW, "files": FILES_ARROW}
    found = {name: snapshots.newest_snapshot(None, storage.table(name)) for name in schemas}
    for there in filter(None, found.values()):
        etl = continued(etl, there.properties)
    made_with = next((there.properties for there in found.values() if there is not None), {})
    wanted = table_properties(etl, source_property(source.location, storage.digits, made_with))
    rows, refs = {}, []
    for name, snapshot in found.items():
        if snapshot is None:
            return None
        if check_properties(snapshot.properties, wanted, snapshot.table.path, etl.replace_source):
            return None
        rows[name] = snapshots.read_columns(None, snapshot.table, schemas[name])
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
        if manifest is None or not _is_same_table(manifest.table, images):
            continue
        # Maintenance makes versions, too, and changes no row.
        if not delta.rows_changed_since(images.path, manifest.table.version) and whole_cache(url, cache):
            return True
    return False


def _is_same_table(one: TableRef, other: TableRef) -> bool:
    """Return whether both name the same table, by its id where both have one: a home may have been moved or mounted."""
    if one.table_id and other.table_id:
        return one.table_id == other.table_id
    return resolved(one.path) == resolved(other.path)
