"""The last change of an image in a batch."""

import pyarrow as pa
import pytest

from tasks.storage import Storage
from tasks.stream.changes import CHANGES_ARROW, add_last_changes
from tasks.tables.relations import Relations


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([("insert", 1)], [("a", 1, 1)]),
        ([("insert", 1), ("insert", 1)], [("a", 1, 2)]),
        ([("insert", 1), ("delete", 2)], []),
        ([("delete", 2), ("insert", 3), ("insert", 1)], [("a", 3, 1)]),
        ([("update_postimage", 2), ("update_preimage", 2), ("insert", 1)], [("a", 2, 1)]),
        ([("insert", 4), ("delete", 4)], [("a", 4, 1)]),
        ([("update_preimage", 2)], []),
    ],
)
def test_last_change_decides_whether_an_image_is_there(
    storage: Storage, changes: list[tuple[str, int]], expected: list[tuple[str, int, int]]
) -> None:
    """In one commit, the row that is added comes after the row that is removed, in whatever order they are read."""
    rows = [("a", change, version, None) for change, version in changes]
    rows += [("b", "insert", 1, "red"), ("b", "delete", 1, "red")]
    columns = dict(zip(CHANGES_ARROW.names, zip(*rows, strict=True), strict=True))
    with Relations(storage) as relations:
        add_last_changes(relations, pa.table({name: list(of) for name, of in columns.items()}, CHANGES_ARROW))
        found = relations.rows("SELECT sha256, _commit_version, num_rows FROM present ORDER BY sha256")
    assert found == [*expected, ("b", 1, 1)]
