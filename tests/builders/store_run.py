"""The DAG without training on a store, in a subprocess: store_run.py SOURCE HOME URL [predict].

It prints its results as JSON; with `predict`, also those of promotion, inference, both streams and maintenance.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.cache.materialize import materialize_cache
from tasks.config.cache import CacheConfig
from tasks.config.maintenance import MaintainConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.maintenance.maintain import maintain_tables
from tasks.object_store import file_system
from tasks.refs import TableRef
from tasks.registry.promote import promote_best
from tasks.spark.session import keep_spark
from tasks.storage import Storage, resolve_storage
from tasks.tables.delta import CREATION_MARK
from tests.builders.etl_tables import ingest
from tests.builders.image_bytes import encoded, noise
from tests.builders.streams import stream
from tests.builders.untrained_model import log_run, predict
from tests.conftest import write_images

CACHE = CacheConfig(image_size=16)


def make_storage(home: Path, url: str) -> Storage:
    """Return the storage of a run with tables, caches and artifacts on a store."""
    config = StorageConfig(home=str(home), tables=f"{url}/tables", cache=f"{url}/cache", artifacts=f"{url}/artifacts")
    return resolve_storage(config)


def ingest_and_cache(source: Path, storage: Storage) -> dict[str, Any]:
    """Run ETL three times, the last time with a changed source, and the cache twice; read the cache."""
    etl = [ingest(source, storage), ingest(source, storage)]
    (source / "red" / "000.png").unlink()
    write_images(source, per_class=1, first=100)
    etl.append(ingest(source, storage))
    caches = [materialize_cache(CACHE, etl[-1].images, storage, SparkConfig()) for _ in range(2)]
    ref = caches[-1][0]
    loader = CacheLoader(ref.url, open_cache(ref), "train", 4)
    rows = sorted(row for batch in loader.epoch(0) for row in batch.rows_B.tolist())
    return {
        "etl": [[report.stored, report.read, report.images.version, report.files.version] for report in etl],
        "caches_built": [built for _, built in caches],
        "rows": rows,
        "images": etl[-1].images.model_dump(),
    }


def promote_and_predict(images: TableRef, storage: Storage) -> dict[str, Any]:
    """Promote two untrained models, run inference twice, first beside a killed run's file, and maintain the tables."""
    filesystem, root = file_system(storage.table("predictions"))
    filesystem.pipe_file(f"{root}/_delta_log/{CREATION_MARK}", b"")
    filesystem.pipe_file(f"{root}/part-00000-killed.snappy.parquet", b"left by a killed run")
    any_figures = PromoteConfig(min_accuracy_gain=-1.0, max_recall_drop=1.0, max_latency_ratio=100.0)
    runs = [log_run(storage, Path(storage.home), seed, 0.5, images) for seed in (1, 2)]
    promoted = [promote_best([run], any_figures, storage) for run in runs]
    predictions = [predict(storage) for _ in range(2)]
    streams = stream_table_and_folder(storage)
    maintained = maintain_tables(MaintainConfig(), storage, SparkConfig())
    return {
        "promoted": [decision.model_dump() for decision in promoted],
        "predicted": [[report.predicted, report.errors] for report in predictions],
        "streamed": streams,
        "maintained": [table.table.path for table in maintained.tables],
    }


def stream_table_and_folder(storage: Storage) -> list[list[int]]:
    """Stream the table, then a folder of the store that gets a file, each twice; return images, batches and lag."""
    folder = f"{storage.tables.removesuffix('/tables')}/new files"
    filesystem, root = file_system(folder)
    found = []
    for name, source in (("of-table", None), ("of-folder", folder)):
        for _run in range(2):
            seed = len(found)
            filesystem.pipe_file(f"{root}/a b/{seed}.png", encoded(noise(20, 20, seed)))
            report = stream(storage, source=source, predictions=f"{storage.tables}/{name}/predictions")
            found.append([report.predicted, report.batches, report.versions_behind + report.files_behind])
    return found


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    source_folder, home_folder, store_url, *stages = sys.argv[1:]
    used = make_storage(Path(home_folder), store_url)
    with keep_spark():
        results = ingest_and_cache(Path(source_folder), used)
        if stages:
            results |= promote_and_predict(TableRef(**results["images"]), used)
    print(json.dumps(results))
