"""Commits of each kind, one after the other until a test ends them: interrupted_commits.py KIND HOME FIRST.

A step of a kind is one commit of ROWS rows with its number, or one run of the ETL on a source that has changed.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from tasks.config.maintenance import MaintainConfig
from tasks.config.prediction import PredictConfig
from tasks.etl.ingest import ingest_images
from tasks.maintenance.maintain import maintain_table
from tasks.predict.predictions import write
from tasks.refs import ModelRef
from tasks.schema import PREDICTIONS, PREDICTIONS_ARROW, PREDICTIONS_PARTITION, PREDICTIONS_PROPERTIES
from tasks.spark.session import keep_spark, spark_session
from tasks.storage import Storage
from tasks.stream.query import run_query
from tasks.tables import delta
from tasks.tables.direct_commits import append_rows
from tasks.tables.writer import commit
from tests.builders.delta_rows import delta_rows
from tests.builders.etl_and_cache import SPARK, make_storage, settings
from tests.builders.processes import ROOT
from tests.conftest import write_images

if TYPE_CHECKING:
    from tests.builders.killed_runs import EndedRun

ROWS = 10
START_SECONDS = 240


def rows_of(number: int) -> pa.Table:
    """Return the predictions of a step."""
    same = {
        "model_name": "photos",
        "model_version": 1,
        "label": "red",
        "predicted_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return pa.Table.from_pylist([{"sha256": f"{number}-{row}"} | same for row in range(ROWS)], PREDICTIONS_ARROW)


def frame_of(spark: SparkSession, number: int) -> DataFrame:
    """Return the predictions of a step as a DataFrame."""
    return spark.createDataFrame(rows_of(number).to_pandas(), PREDICTIONS)


def create(spark: SparkSession, storage: Storage, number: int) -> None:
    """Create a table by Spark."""
    path = f"{storage.tables}/created-{number}"
    if delta.newest_commit(path) is None:
        delta.create_table(path, frame_of(spark, number), PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)


def append(_spark: SparkSession, storage: Storage, number: int) -> None:
    """Create a table without Spark, and append to it."""
    path = f"{storage.tables}/appended-{number}"
    for version in range(2):
        newest = delta.newest_commit(path)  # of a step that was ended
        if newest is None or int(newest[:20]) < version:
            append_rows(path, rows_of(2 * number + version), PREDICTIONS_PROPERTIES)


def merge(spark: SparkSession, storage: Storage, number: int) -> None:
    """Merge predictions."""
    model = ModelRef(name="photos", version=1, run_id="0" * 32)
    write(frame_of(spark, number), storage.table("predictions"), model, PredictConfig())


def delete(spark: SparkSession, storage: Storage, number: int) -> None:
    """Merge predictions, and delete those of the step before."""
    merge(spark, storage, number)
    table = DeltaTable.forPath(spark, storage.table("predictions"))
    commit(storage.table("predictions"), lambda: table.delete(f"sha256 LIKE '{number - 1}-%'"))


def rewrite(spark: SparkSession, storage: Storage, number: int) -> None:
    """Merge predictions, and compact the table."""
    merge(spark, storage, number)
    maintain_table(spark, storage.table("predictions"), MaintainConfig(), [])


def set_properties(spark: SparkSession, storage: Storage, number: int) -> None:
    """Merge predictions in the first step, and set a property."""
    if number == 0:
        merge(spark, storage, number)
    delta.set_properties(spark, storage.table("predictions"), {"lakevision.step": str(number)})


def stream(spark: SparkSession, storage: Storage, number: int) -> None:
    """Merge the changes of a table in the batches of a stream, which continues where it was ended."""
    source, model = f"{storage.tables}/source", ModelRef(name="photos", version=1, run_id="0" * 32)
    append_rows(source, rows_of(number))
    changes = spark.readStream.format("delta").load(source)
    target = storage.table("predictions")
    run_query(
        changes, lambda batch: (write(batch, target, model, PredictConfig()), None)[1], f"{target}.checkpoint", None
    )


def ingest(_spark: SparkSession, storage: Storage, number: int) -> None:
    """Run the ETL on a source with new images, of which an older one is deleted, and another moved."""
    source = source_of(storage)
    write_images(source, 2, first=2 * number)
    if number:
        (source / "blue" / f"{2 * number - 2:03d}.png").unlink(missing_ok=True)
        moved = source / "red" / f"{2 * number - 2:03d}.png"
        if moved.exists():
            moved.rename(source / "green" / f"moved-{number}.png")
    ingest_images(settings(source), storage, SPARK)


def replace(_spark: SparkSession, storage: Storage, number: int) -> None:
    """Run the ETL on another source in place of the former one."""
    source = source_of(storage, number % 2)
    write_images(source, 2, first=100 * (number % 2))
    ingest_images(
        settings(source).model_copy(update={"replace_source": True, "max_deleted_fraction": 1.0}), storage, SPARK
    )


KINDS: dict[str, Callable[[SparkSession, Storage, int], None]] = {
    step.__name__: step for step in (create, append, merge, delete, rewrite, set_properties, stream, ingest, replace)
}


def source_of(storage: Storage, number: int = 0) -> Path:
    """Return a source folder of the ETL."""
    return Path(storage.home).with_name(f"source-{number}")


def versions_of(path: Path) -> list[Counter[str]]:
    """Return the number of rows of each key in every version of a table, after all rows are read without Spark."""
    found = []
    log = path / "_delta_log"
    for version in range(len(list(log.glob("*[0-9].json")))):
        rows = delta_rows(deltalake.DeltaTable(path, version=version))
        found.append(Counter(rows["path" if path.name == "files" else "sha256"].to_pylist()))
    return found


def tables_of(storage: Storage) -> list[Path]:
    """Return the tables that exist."""
    return sorted(log.parent for log in Path(storage.tables).glob("*/_delta_log") if any(log.glob("*.json")))


def run_and_end(
    kind: str, storage: Storage, first: int, number: signal.Signals, seconds: float
) -> "tuple[int, EndedRun]":
    """Commit in a process of its own, and send it a signal some time after the first step began.

    Returns:
        The number of the step that it was in, and the process after its end.
    """
    from tests.builders.killed_runs import StartedRun, end_run  # torch: half of each process's start

    log = Path(storage.home) / "commits.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        words = [sys.executable, "-m", "tests.builders.interrupted_commits", kind, storage.home, str(first)]
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    deadline = time.monotonic() + START_SECONDS
    while "step" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(process.pid, number)
    ended = end_run(StartedRun(process, log))
    steps = [int(line.split()[1]) for line in ended.output.splitlines() if line.startswith("step ")]
    print(f"{kind}: {number.name} after {seconds:.2f} s, in step {steps[-1:]}, status {ended.returncode}")
    return steps[-1] if steps else first, ended


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    name, home, start = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs inherit as ignored
    used = make_storage(Path(home))
    with keep_spark(), spark_session(SPARK, used) as session:
        for step_number in range(int(start), 10_000):
            print(f"step {step_number}", flush=True)
            KINDS[name](session, used, step_number)
