"""Changes of the ledger after a comparison."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from tasks.etl.outcome_queries import CHANGES, COUNT_CHANGES, FILL, FILLABLE
from tasks.schema import DELETED, FILES_ARROW
from tasks.tables.relations import Relations

FILLED_ROWS = 1_000_000
"""Number of rows of an earlier release that one run completes: about 300 MB in memory."""


@dataclass(frozen=True)
class LedgerChanges:
    """New and changed rows of the ledger.

    Attributes:
        num_rows: Number of rows.
        all_new: Whether no row has a path that the ledger has.
    """

    num_rows: int
    all_new: bool
    _relations: Relations
    _seen_at: datetime

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, with the columns of FILES_ARROW, ordered by path."""
        values = {"deleted": DELETED, "seen_at": self._seen_at}
        return self._relations.batches(f"FROM ({CHANGES}) ORDER BY path", FILES_ARROW, values)

    def table(self) -> pa.Table:
        """Return the rows as a table in memory."""
        return pa.Table.from_batches(self.batches(), FILES_ARROW)


def find_changes(relations: Relations, seen_at: datetime) -> LedgerChanges:
    """Return the new and changed rows of the ledger, once all outcomes are determined.

    Files that are no longer in the source have the outcome deleted. If there are changes, up to FILLED_ROWS rows of an
    earlier release get the inode and time of status change that they lack.
    """
    # Queries and not a table, since the changes of a first run are as large as the ledger.
    values = {"deleted": DELETED, "seen_at": seen_at}
    ((num_changes, num_known),) = relations.rows(COUNT_CHANGES, values)
    if num_changes and relations.rows("SELECT 1 FROM known WHERE inode IS NULL LIMIT 1"):
        relations.run(FILLABLE, {"most": FILLED_ROWS})
        relations.run(FILL)
        ((num_changes, num_known),) = relations.rows(COUNT_CHANGES, values)
    return LedgerChanges(num_changes, num_known == 0, relations, seen_at)
