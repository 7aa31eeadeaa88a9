"""Versions of tables, read without Spark."""

from pathlib import Path

import deltalake
import pyarrow as pa

from tasks.refs import TableRef
from tasks.tables.properties import SOURCE_PROPERTY
from tasks.tables.snapshots import at_version, latest


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
