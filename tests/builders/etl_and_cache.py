"""ETL and cache in a subprocess that a test may kill: etl_and_cache.py SOURCE HOME."""

import logging
import sys
from pathlib import Path

from tasks.cache.materialize import materialize_cache
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.etl.ingest import ingest_images
from tasks.refs import CacheRef
from tasks.spark.session import keep_spark
from tasks.storage import Storage, resolve_storage

SPARK = SparkConfig(driver_memory="1g")
CACHE = CacheConfig(image_size=64)


def settings(source: Path) -> EtlConfig:
    """Return settings with which images are decoded, scaled down and encoded."""
    return EtlConfig(source=str(source), stored_side=64, val_fraction=0.2, test_fraction=0.2)


def make_storage(home: Path) -> Storage:
    """Return the storage of a run in `home`."""
    return resolve_storage(StorageConfig(home=str(home)))


def run(source: Path, storage: Storage) -> CacheRef:
    """Run both stages in one session."""
    with keep_spark():
        images = ingest_images(settings(source), storage, SPARK).images
        return materialize_cache(CACHE, images, storage, SPARK)[0]


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lakevision").setLevel(logging.INFO)
    run(Path(sys.argv[1]), make_storage(Path(sys.argv[2])))
