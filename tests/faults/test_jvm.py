"""Sessions and ETL runs after the JVM of Spark was killed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from pyspark import SparkContext

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_images
from tasks.spark.session import keep_spark, spark_session
from tasks.storage import Storage
from tasks.tables import snapshots


def kill_jvm() -> None:
    """Kill the JVM of this process's session with SIGKILL."""
    os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)


def kill_jvm_after(seconds: float) -> threading.Thread:
    """Start a thread that kills the JVM `seconds` after its start."""

    def wait_and_kill() -> None:
        while SparkContext._gateway is None:
            time.sleep(0.05)
        time.sleep(seconds)
        kill_jvm()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


def rows(storage: Storage) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Return the rows of both tables, without the times at which they were written."""
    with spark_session(SparkConfig(), storage) as spark:
        images = snapshots.read_version(spark, snapshots.latest(spark, storage.table("images")))
        files = snapshots.read_version(spark, snapshots.latest(spark, storage.table("files")))
        return (
            {tuple(map(str, row)) for row in images.drop("ingested_at").collect()},
            {tuple(map(str, row)) for row in files.drop("seen_at", "changed_at", "inode").collect()},
        )


def test_session_after_a_killed_jvm_is_new(storage):
    """A new session starts even inside a scope that keeps one session for several stages."""
    with keep_spark():
        with spark_session(SparkConfig(), storage) as first:
            kill_jvm()
            SparkContext._gateway.proc.wait()
            with pytest.raises(Exception):  # noqa: B017, PT011  # a dead socket fails in many ways
                first.range(10).count()
        with spark_session(SparkConfig(), storage) as second:
            assert second.range(10).count() == 10
    assert SparkContext._gateway is None


def test_jvm_that_dies_while_it_is_stopped_is_no_error(storage, monkeypatch):
    """The work is done by then; the next session starts another JVM."""
    with spark_session(SparkConfig(), storage) as session:
        stop = session.stop
        monkeypatch.setattr(session, "stop", lambda: (kill_jvm(), stop()))
    assert SparkContext._gateway is None
    with spark_session(SparkConfig(), storage) as session:
        assert session.range(10).count() == 10


@pytest.mark.parametrize("seconds", [1.0, 1.5, 2.0, 5.0, 8.0])
def test_etl_after_a_killed_jvm_equals_undisturbed_etl(make_images, storage, tmp_path: Path, seconds):
    """Kills at several moments between start and second commit leave the next run the rows of an undisturbed run."""
    source = make_images(per_class=40)
    killer = kill_jvm_after(seconds)
    try:
        ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    except Exception as error:  # the error depends on the moment
        print(f"killed after {seconds} s: {type(error).__name__}")
    killer.join()
    again = ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    assert again.stored == 120
    undisturbed = storage.model_copy(update={"home": str(tmp_path / "other"), "tables": str(tmp_path / "other")})
    ingest_images(EtlConfig(source=str(source)), undisturbed, SparkConfig())
    assert rows(storage) == rows(undisturbed)
