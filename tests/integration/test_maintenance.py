"""Maintenance on real Delta tables and a real registry."""

import os
from pathlib import Path

import mlflow
import pytest
from pyspark.sql import SparkSession

from tasks import tracking
from tasks.cache.materialize import materialize_cache
from tasks.config import CacheConfig, EtlConfig, MaintainConfig, SparkConfig
from tasks.errors import WrongInput
from tasks.etl import snapshots
from tasks.etl.ingest import ingest_images
from tasks.maintenance.maintain import RETENTION_CHECK, maintain_table, maintain_tables
from tasks.refs import TableRef
from tests.conftest import write_pictures


@pytest.fixture
def any_retention(spark: SparkSession):
    """Let VACUUM delete what left the table this moment."""
    spark.conf.set(RETENTION_CHECK, "false")
    yield
    spark.conf.unset(RETENTION_CHECK)


def ingest(source, storage) -> TableRef:
    """Run ETL; return the table images."""
    return ingest_images(EtlConfig(source=str(source)), storage, SparkConfig()).images


def hashes(spark: SparkSession, table: TableRef) -> set[str]:
    """Return the keys of a version's pictures, with every byte of their content read."""
    rows = snapshots.read_version(spark, table).select("sha256", "content").collect()
    return {row["sha256"] for row in rows if row["content"]}


def register(storage, table: TableRef) -> None:
    """Register a model that was trained from this version of the table."""
    config = {"data": {"table": table.path, "version": table.version}}
    with tracking.tracked_run(storage, "by hand", "key", config, {}, None) as run:
        pass
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    client.create_registered_model("lakevision")
    client.create_model_version("lakevision", source=f"runs:/{run.run_id}/model", run_id=run.run_id)


def grown(spark, source, storage) -> tuple[TableRef, set[str]]:
    """Make three versions, whose first has pictures that the last has not; return the first and its pictures."""
    first = ingest(source, storage)
    held = hashes(spark, first)
    write_pictures(source, 5, first=100)
    ingest(source, storage)
    for file in source.glob("red/00*.png"):
        file.unlink()
    ingest(source, storage)
    return first, held


def test_maintenance_compacts_and_keeps_what_models_were_trained_from(spark, source, storage, any_retention):
    """No picture changes, no cache is invalidated, and only a version that no model needs any more loses its files."""
    first, held = grown(spark, source, storage)
    register(storage, first)
    newest = snapshots.latest(spark, first.path)
    kept = hashes(spark, newest)
    assert kept != held
    cache, built = materialize_cache(CacheConfig(image_size=16), newest, storage, SparkConfig())
    assert built

    # What a killed run left: a data file that no commit names.
    uncommitted = Path(first.path) / "part-00000-killed.zstd.parquet"
    uncommitted.touch()
    os.utime(uncommitted, (0, 0))

    report = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig())

    assert not uncommitted.exists()
    images = next(done for done in report.tables if done.table.path == first.path)
    assert images.files_compacted > images.files_written
    assert images.kept_versions == [first.version]
    assert images.retention_hours >= 1
    assert hashes(spark, first) == held
    assert hashes(spark, images.table) == kept
    assert materialize_cache(CacheConfig(image_size=16), images.table, storage, SparkConfig()) == (cache, False)

    mlflow.MlflowClient(tracking_uri=storage.tracking).delete_registered_model("lakevision")
    done = maintain_table(
        spark, first.path, MaintainConfig(vacuum_hours=0), tracking.trained_versions(storage).get(first.path, set())
    )

    assert done.files_deleted > 0
    assert hashes(spark, done.table) == kept


def test_a_retention_that_delta_refuses_is_one_sentence(spark, source, storage):
    """With the way out."""
    ingest(source, storage)
    with pytest.raises(WrongInput, match="maintain.vacuum_hours is 24, and Delta keeps 168 hours at least"):
        maintain_tables(MaintainConfig(vacuum_hours=24), storage, SparkConfig())


def test_a_table_with_other_columns_is_refused_and_unchanged(spark, source, storage):
    """Nothing is mixed in, and the columns are named."""
    before = ingest(source, storage)
    spark.sql(f"ALTER TABLE delta.`{before.path}` ADD COLUMNS (author STRING)")
    changed = snapshots.latest(spark, before.path)
    with pytest.raises(WrongInput, match=f"the table '{before.path}' has author, which is unknown"):
        ingest(source, storage)
    assert snapshots.latest(spark, before.path) == changed
