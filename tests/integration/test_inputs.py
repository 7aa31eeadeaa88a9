"""The table `inputs`, merged by a real Spark."""

from datetime import UTC, datetime, timedelta

import pytest
from delta.tables import DeltaTable
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from tasks.config.maintenance import MaintainConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.maintenance.maintain import maintain_tables
from tasks.predict.inputs import inputs_table, record_inputs
from tasks.schema import INPUTS
from tasks.tables import delta

NOON = datetime(2025, 5, 6, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)
COLUMNS = [INPUTS[name] for name in ("source", "path", "size", "modified_at", "sha256")]


@pytest.fixture
def files(spark):
    """Return a function that makes rows of files."""

    def make(*rows, error=False):
        return spark.createDataFrame(list(rows), StructType([*COLUMNS, *[INPUTS["error"]] * error]))

    return make


def test_rows_of_files_are_merged_and_a_repeated_call_commits_nothing(spark, storage, files):
    """A changed file replaces its row, a file that is gone loses it, and equal paths of two sources are two files."""
    inputs = inputs_table(storage.table("predictions"))
    assert inputs == storage.table("inputs")
    first = files(("/a", "x y/ü.png", 1, NOON, "aa"), ("/a", "z.png", 2, NOON, "bb"), ("/b", "z.png", 2, NOON, "bb"))
    assert [record_inputs(first, inputs), record_inputs(first, inputs)] == [3, 0]

    second = files(
        ("/a", "z.png", 2, NOON, "cc", None), ("/a", "z.png", 3, LATER, "dd", None),
        ("/b", "new.png", 4, NOON, None, "unreadable: request 1"), error=True,
    )  # fmt: skip
    gone = files(("/a", "x y/ü.png", 0, NOON, None), ("/a", "never there.png", 0, NOON, None))
    assert [record_inputs(second, inputs, gone), record_inputs(second, inputs, gone)] == [3, 0]
    # The message of a store may have another number in it.
    again = files(("/b", "new.png", 4, NOON, None, "unreadable: request 2"), error=True)
    assert record_inputs(again, inputs) == 0

    table = spark.read.format("delta").load(inputs)
    assert table.columns == INPUTS.names
    rows = {(row["source"], row["path"]): row for row in table.collect()}
    assert {key: (row["size"], row["modified_at"].astimezone(UTC), row["sha256"]) for key, row in rows.items()} == {
        ("/a", "z.png"): (3, LATER, "dd"),
        ("/b", "z.png"): (2, NOON, "bb"),
        ("/b", "new.png"): (4, NOON, None),
    }
    assert rows["/b", "new.png"]["error"] == "unreadable: request 1"
    assert rows["/a", "z.png"]["seen_at"] > rows["/b", "z.png"]["seen_at"]
    assert DeltaTable.forPath(spark, inputs).history(1).collect()[0]["version"] == 1
    (maintained,) = maintain_tables(MaintainConfig(), storage, SparkConfig()).tables
    assert maintained.table.path == inputs


def test_table_of_an_earlier_release_gets_the_columns_with_the_next_change(spark, storage, files):
    """Its rows have no inode, and its files count as unchanged until they are read."""
    inputs = storage.table("inputs")
    old = files(("/a", "x.png", 1, NOON, "aa", None), ("/a", "y.png", 1, NOON, "bb", None), error=True)
    old = old.withColumn("seen_at", F.lit(NOON))
    delta.create_table(inputs, old, {})
    assert record_inputs(files(("/a", "x.png", 1, NOON, "aa")), inputs) == 0
    assert "inode" not in spark.read.format("delta").load(inputs).columns

    assert record_inputs(files(("/a", "x.png", 1, NOON, "cc")).withColumn("inode", F.lit(7)), inputs) == 1

    table = spark.read.format("delta").load(inputs)
    assert table.columns == INPUTS.names
    assert {row["path"]: (row["sha256"], row["inode"]) for row in table.collect()} == {
        "x.png": ("cc", 7),
        "y.png": ("bb", None),
    }


def test_table_with_other_columns_is_refused(spark, storage, files):
    """The message names them, and the table is unchanged."""
    inputs = storage.table("inputs")
    spark.createDataFrame([("a", 1)], "path string, size string").write.format("delta").save(inputs)
    with pytest.raises(WrongInput, match=r"error \(string\), .*size \(bigint\), size \(string\)") as refused:
        record_inputs(files(("/a", "x.png", 1, NOON, "aa")), inputs)
    assert refused.value.setting == "predict.predictions"
    assert DeltaTable.forPath(spark, inputs).history(1).collect()[0]["version"] == 0
