"""Check of the disk space for the cache that a run of the DAG will write."""

import glob
import logging
import shutil

from tasks.cache.manifest import MANIFEST, read_manifest, whole_cache
from tasks.cache.write import cache_bytes, check_disk
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.etl.ingest import open_tables
from tasks.etl.outcomes import Comparison
from tasks.etl.source import Source
from tasks.object_store import file_system
from tasks.paths import resolved
from tasks.refs import TableRef
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.disk import existing_folder
from tasks.tables import delta, snapshots
from tasks.tables.relations import Relations

logger = logging.getLogger("lakevision.preflight")


def check_room(etl: EtlConfig, cache_config: CacheConfig, source: Source, storage: Storage) -> None:
    """Check that the disk has space for the run's cache; an existing cache needs none.

    Raises:
        WrongInput: The disk has too little space; the message has the needed and the free space.
    """
    needed = cache_bytes(source.listing.num_rows, cache_config)
    folder = existing_folder(storage.cache)
    # The comparison of the source with large tables takes seconds: done only if the disk is too small.
    if folder is None or needed <= shutil.disk_usage(folder).free:
        return
    try:
        images = _unchanged_images(etl, source, storage)
    except NeedsSpark:
        # The disk is checked again when a cache is built; an error here could stop runs that have their cache.
        logger.info("only Spark can read the tables in %s: the disk is checked when a cache is built", storage.tables)
        return
    if images is None or not _has_cache(images, cache_config, storage):
        check_disk(storage.cache, needed)


def _unchanged_images(etl: EtlConfig, source: Source, storage: Storage) -> TableRef | None:
    """Return the newest version of `images` if no file was added, changed or removed since, else None.

    Files that the ETL reads again in every run, such as those without read permission, count as unchanged.
    """
    tables = open_tables(None, etl, storage, source)
    if None in tables.versions or tables.replaced:
        return None
    with Relations(storage) as relations:
        keep = etl.deleted == "keep"
        Comparison(relations, source.listing, tables.ledger, tables.existing, replaced=False, keep_deleted=keep)
        changed = relations.rows("SELECT count(*) FROM changed WHERE status <> 'again'")[0][0]
    return None if changed else snapshots.latest(None, storage.table("images"))


def _has_cache(images: TableRef, cache_config: CacheConfig, storage: Storage) -> bool:
    """Return whether a complete cache of this version exists, or of an earlier version with the same rows."""
    filesystem, root = file_system(storage.cache)
    changed = delta.last_change(images.path)  # Maintenance creates versions, too, without a change of rows.
    for path in filesystem.glob(f"{glob.escape(root)}/[!.]*/{MANIFEST}"):
        url = f"{storage.cache.rstrip('/')}/{path.split('/')[-2]}"
        manifest = read_manifest(url)
        if manifest is None or not _is_same_table(manifest.table, images):
            continue
        if changed <= manifest.table.version and whole_cache(url, cache_config):
            return True
    return False


def _is_same_table(one: TableRef, other: TableRef) -> bool:
    """Return whether both are the same table, by id if both have one: a home may have been moved or mounted."""
    if one.table_id and other.table_id:
        return one.table_id == other.table_id
    return resolved(one.path) == resolved(other.path)
