"""One step on the tables of `scale_data.py`, as a script that prints its costs: `scale_steps.py STEP FOLDER`."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pyspark import SparkContext
from pyspark.sql import functions as F

from tasks.cache.materialize import plan_files, read_content, storing_of, with_files
from tasks.cache.write import rows_per_file, rows_per_group
from tasks.config.cache import CacheConfig
from tasks.config.maintenance import MaintainConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_images
from tasks.etl.source import prepare_source
from tasks.etl.validate import measure_tables
from tasks.maintenance.maintain import maintain_tables
from tasks.predict.pending import PREDICTED_ARROW, pending_images
from tasks.predict.predictions import predicted_by
from tasks.refs import EtlReport, ModelRef
from tasks.spark.session import keep_spark, spark_session
from tasks.tables import snapshots
from tests.benchmarks.scale_data import CLASSES, MODEL, NEW_VERSION, etl_settings, storage_below, write_new
from tests.benchmarks.scale_first_run import first_run, write_rows

NEW_SHARE = 0.01


def listing(folder: Path) -> int:
    """List the source."""
    return prepare_source(etl_settings(folder), storage_below(folder), SparkConfig()).listing.num_rows


def nothing_new(folder: Path) -> int:
    """List the source and compare it with the tables, which are up to date."""
    report = ingest_images(etl_settings(folder), storage_below(folder), SparkConfig())
    assert not report.changed
    return report.read


def incremental(folder: Path) -> int:
    """Ingest the new files that `write_new_files` wrote."""
    report = ingest_images(etl_settings(folder), storage_below(folder), SparkConfig())
    assert report.changed
    return report.read


def _num_files(folder: Path) -> int:
    return sum(1 for _ in folder.glob("source/class-000/*.jpg")) * CLASSES


def read_names(folder: Path) -> None:
    """Read the names of all files, so that they are in the system's cache at every size."""
    for found in folder.glob("source/*"):
        os.listdir(found)


def write_first_run(folder: Path) -> None:
    """Write the rows of a first run that read as many files as the source has."""
    write_rows(folder, _num_files(folder))


def write_new_files(folder: Path) -> None:
    """Add one per cent of new files to the source."""
    count = _num_files(folder)
    write_new(folder / "source", count, round(count * NEW_SHARE))


def near_duplicates(folder: Path) -> int:
    """Validate the tables, of which the search for near-duplicates is the largest part."""
    storage = storage_below(folder)
    images, files = (snapshots.latest(None, storage.table(name)) for name in ("images", "files"))
    report = EtlReport(
        images=images, files=files, stored=0, duplicates=0, quarantined=0, read=0, changed=True, classes={}
    )
    return measure_tables(None, report, etl_settings(folder), storage).near_duplicates


def cache_planning(folder: Path) -> int:
    """Compute the content digest of a cache, and the file of each image."""
    storage = storage_below(folder)
    cache = CacheConfig()
    with spark_session(SparkConfig(), storage) as spark:
        table = snapshots.latest(spark, storage.table("images"))
        images = snapshots.read_version(spark, table)
        content = read_content(images, table, storing_of(spark, table)[0])
        per_file = {split: rows_per_file(rows_per_group(rows, cache), cache) for split, rows in content.rows.items()}
        placed = with_files(spark, images, plan_files(spark, table, per_file, storage), content.classes)
        return int(placed.agg(F.count_distinct("split", "file")).collect()[0][0])


def anti_join(folder: Path) -> int:
    """Find the images without a prediction."""
    storage = storage_below(folder)
    images = snapshots.latest(None, storage.table("images"))
    model = ModelRef(name=MODEL, version=NEW_VERSION, run_id="")
    predicted = predicted_by(None, model, storage.table("predictions"), PREDICTED_ARROW, storage)
    with pending_images(None, images, predicted, storage) as pending:
        return pending.count


def maintenance(folder: Path) -> int:
    """Compact the tables, and look for files to delete."""
    done = maintain_tables(MaintainConfig(), storage_below(folder), SparkConfig())
    return sum(table.files_compacted for table in done.tables)


STEPS: dict[str, tuple[Callable[[Path], int], Callable[[Path], None] | None]] = {
    "listing": (listing, read_names),
    "first run": (first_run, write_first_run),
    "nothing new": (nothing_new, read_names),
    "1 % new": (incremental, write_new_files),
    "near-duplicates": (near_duplicates, None),
    "cache planning": (cache_planning, None),
    "anti-join": (anti_join, None),
    "maintenance": (maintenance, None),
}
"""By name, the step and its preparation."""


def _jvm_bytes() -> int:
    """Return the peak memory of the JVM, 0 without one."""
    gateway = SparkContext._gateway
    if gateway is None:
        return 0
    status = Path(f"/proc/{gateway.proc.pid}/status").read_text()
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kilobytes) * 1024


def main() -> None:
    """Run a step, and print its time and the peak memory of driver and JVM."""
    step, prepare = STEPS[sys.argv[1]]
    folder = Path(sys.argv[2])
    if prepare is not None:
        prepare(folder)
    with keep_spark():
        began = time.perf_counter()
        found = step(folder)
        seconds = time.perf_counter() - began
        jvm = _jvm_bytes()
    print(f"{sys.argv[1]}: {found}; {psutil.Process().memory_info().rss} bytes at the end")
    driver = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "driver_bytes": driver, "jvm_bytes": jvm}))


if __name__ == "__main__":
    main()
