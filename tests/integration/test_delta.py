"""Delta tables read without Spark have the rows that Spark reads."""

import os
from pathlib import Path

import pyarrow as pa
import pytest
from delta.tables import DeltaTable

from tasks.config.storage import StorageConfig
from tasks.refs import TableRef
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW
from tasks.spark.session import NeedsSpark
from tasks.storage import resolve_storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import SpooledRows
from tasks.tables.relations import Relations
from tests.builders.etl_tables import ingest
from tests.conftest import write_images


def read_both_ways(spark, table: TableRef, schema: pa.Schema) -> tuple[list[dict], list[dict]]:
    """Return the rows, sorted, as read by `read_columns` and by Spark."""
    found = snapshots.read_columns(spark, table, schema)
    assert found.schema.equals(schema)
    by_spark = snapshots.read_version(spark, table).select(*schema.names).toArrow()
    key = schema.names[0]
    return tuple(sorted(rows.to_pylist(), key=lambda row: row[key]) for rows in (found, by_spark.cast(schema)))


def query_both_ways(spark, storage, table: TableRef, schema: pa.Schema, where: dict) -> tuple[list[dict], list[dict]]:
    """Return the rows with these values, sorted, as a query of `version_rows` and Spark give them."""
    by_spark = snapshots.read_version(spark, table)
    for name, value in where.items():
        by_spark = by_spark.where(by_spark[name] == value)
    with Relations(storage) as relations:
        relations.add("found", snapshots.version_rows(spark, table, schema, Path(storage.home), where))
        found = relations.table("FROM found", schema)
    theirs = by_spark.select(*schema.names).toArrow().cast(schema)
    return tuple(sorted(rows.to_pylist(), key=lambda row: row[schema.names[0]]) for rows in (found, theirs))


@pytest.mark.parametrize(
    "name", ["a b=ü#?", pytest.param("home", marks=pytest.mark.long), pytest.param("a%20b", marks=pytest.mark.long)]
)
def test_rows_written_by_workers_and_by_spark_are_read_alike(spark, source, tmp_path, name):
    """Created, appended and merged versions are equal; Spark writes times of merged rows in Parquet's older type."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path / name)))
    reports = [ingest(source, storage)]
    write_images(source, per_class=2, first=100)
    reports.append(ingest(source, storage))
    os.replace(source / "red" / "000.png", source / "green" / "moved.png")
    (source / "blue" / "000.png").unlink()
    reports.append(ingest(source, storage))
    for number, report in enumerate(reports):
        if "%" in name:  # delta-rs cannot read such a path: only Spark can
            with pytest.raises(NeedsSpark):
                snapshots.properties_of(report.images)
        else:
            assert snapshots.properties_of(report.images)["lakevision.source"] == str(source)
        # Spark sets the properties of a new table in a second commit.
        assert report.images.version == report.files.version == number + ("%" in name)
        for table, schema in ((report.images, IMAGE_KEYS_ARROW), (report.files, FILES_ARROW)):
            ours, theirs = read_both_ways(spark, table, schema)
            assert ours == theirs
    assert len(ours) == 67
    ours, theirs = query_both_ways(spark, storage, report.files, FILES_ARROW, {"label": "red", "split": "train"})
    assert ours == theirs
    assert ours


def test_rows_of_several_batches_are_streamed_from_spark(spark, storage, tmp_path, monkeypatch):
    """A table that only Spark can read is copied batch by batch, empty partitions included."""
    monkeypatch.setattr(snapshots, "STREAM_ROWS", 150)
    path = str(tmp_path / "a%20b")
    schema = pa.schema([("number", pa.int64())])
    frame = spark.range(1000).withColumnRenamed("id", "number").repartition(3)
    frame.where("number % 7 > 0").write.format("delta").save(path)
    rows = snapshots.version_rows(spark, snapshots.latest(spark, path), schema, tmp_path)
    assert isinstance(rows, SpooledRows)
    assert rows.num_rows == 857
    assert sorted(rows.table()["number"].to_pylist()) == [number for number in range(1000) if number % 7]
    empty = snapshots.version_rows(spark, snapshots.latest(spark, path), schema, tmp_path, {"number": -1})
    with Relations(storage) as relations:
        relations.add("found", empty)
        assert relations.rows("SELECT count(*) FROM found") == [(0,)]


def test_rows_deleted_by_deletion_vectors_are_not_read(spark, tmp_path):
    """Deletion vectors, a newer protocol feature, mark rows of a file that are not in the table."""
    path = str(tmp_path / "table")
    schema = pa.schema([("number", pa.int64())])
    spark.range(100).withColumnRenamed("id", "number").coalesce(1).write.format("delta").save(path)
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    DeltaTable.forPath(spark, path).delete("number < 10")
    ours, theirs = read_both_ways(spark, snapshots.latest(spark, path), schema)
    assert ours == theirs == [{"number": number} for number in range(10, 100)]
