"""Versions of tables, read without Spark."""

from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from tasks.refs import TableRef
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables.direct_commits import append_rows
from tasks.tables.properties import SOURCE_PROPERTY
from tasks.tables.relations import Relations
from tasks.tables.snapshots import at_version, latest, read_batches, read_columns, version_rows


def test_version_has_the_source_it_was_made_from(tmp_path: Path) -> None:
    """A version has the source of its time, and a table of another program has none."""
    path = str(tmp_path / "images")
    rows = pa.table({"sha256": ["a"]})
    table = deltalake.DeltaTable.create(
        path,
        deltalake.Schema.from_arrow(rows.schema),
        configuration={SOURCE_PROPERTY: "/data/cats"},
        raise_if_key_not_exists=False,
    )
    assert latest(None, path).source == "/data/cats"
    table.alter.set_table_properties({SOURCE_PROPERTY: "/data/dogs"}, raise_if_not_exists=False)
    assert (latest(None, path).version, latest(None, path).source) == (1, "/data/dogs")
    assert latest(None, path).table_id == str(table.metadata().id)
    deltalake.write_deltalake(str(tmp_path / "own"), rows)
    assert latest(None, str(tmp_path / "own")).source == ""
    assert latest(None, path).is_version(TableRef(path=path, version=1, table_id=str(table.metadata().id)))
    assert not latest(None, path).is_version(at_version(None, path, None).model_copy(update={"version": 0}))


ROWS = [
    {"sha256": sha256, "model_name": name, "model_version": version}
    for sha256, name, version in (("a", "cats", 1), ("b", "cats", 1), ("c", "cats", 2), ("d", "dogs", 2))
]


def test_rows_of_a_partition_are_read_from_its_files(storage: Storage, tmp_path: Path) -> None:
    """A partition column, which files lack, has its value in each row; only files with wanted values are read."""
    path = str(tmp_path / "predictions")
    schema = pa.schema([("sha256", pa.string()), ("model_name", pa.string()), ("model_version", pa.int64())])
    append_rows(path, pa.Table.from_pylist(ROWS, schema), None, ["model_version"])
    append_rows(path, pa.Table.from_pylist([ROWS[0] | {"sha256": "e"}], schema), None, ["model_version"])
    table = latest(None, path)
    wanted: dict[str, str | int] = {"model_name": "cats", "model_version": 1}
    expected = [ROWS[0], ROWS[1], ROWS[0] | {"sha256": "e"}]

    rows = version_rows(None, table, schema, tmp_path, wanted)
    assert len(rows.files) == 2
    assert all("/model_version=1/" in file for file in rows.files)
    with Relations(storage) as relations:
        relations.add("own", rows)
        relations.add("names", version_rows(None, table, schema.remove(2), tmp_path))
        relations.add("all_rows", version_rows(None, table, schema, tmp_path, {"model_name": "cats"}))
        assert relations.table("SELECT * FROM own ORDER BY sha256", schema).to_pylist() == expected
        assert relations.rows("SELECT string_agg(sha256, '' ORDER BY sha256) FROM names") == [("abcde",)]
        assert relations.rows("SELECT sha256, model_version FROM all_rows ORDER BY sha256") == [
            ("a", 1),
            ("b", 1),
            ("c", 2),
            ("e", 1),
        ]
    assert read_columns(None, table, schema, wanted).sort_by("sha256").to_pylist() == expected
    assert read_columns(None, table, schema.remove(2)).num_rows == 5
    (batch,) = (batch for batch in read_batches(table, schema, {"model_version": 2}, 10) if batch.num_rows)
    assert batch.to_pylist() == ROWS[2:]


@pytest.mark.parametrize("value", [None, "a b"])
def test_partitions_that_names_of_files_encode_are_left_to_spark(tmp_path: Path, value: str | None) -> None:
    """A null, and text with characters that are escaped in a name, have directories that readers decode differently."""
    path = str(tmp_path / "own")
    rows = pa.table({"sha256": ["a"], "kind": pa.array([value], pa.string())})
    append_rows(path, rows, None, ["kind"])
    with pytest.raises(NeedsSpark):
        latest(None, path)
