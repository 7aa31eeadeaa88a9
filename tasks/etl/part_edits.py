"""Parts of new images to commit, and the rows to remove or change in them."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tasks.etl import part_queries
from tasks.tables.parts import REWRITE_ARROW
from tasks.tables.relations import Relations

EDITS_ARROW = pa.schema([("part", pa.string()), ("sha256", pa.string()), ("split", pa.string())])
"""Rows of parts to remove (split is null) or to give another split."""


@dataclass(frozen=True)
class Edits:
    """Rows of parts to remove or change before the parts are committed.

    Attributes:
        whole: Parts that are committed as they are, with their numbers of rows.
    """

    whole: dict[str, int]
    _relations: Relations

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the other parts with rows to insert, with the columns of REWRITE_ARROW.

        Rows that are a duplicate in another part, in conflict, or in the table already are removed.
        """
        remaining = EDITS_ARROW.empty_table()
        for batch in self._relations.batches(part_queries.EDITS, EDITS_ARROW):
            rows = pa.concat_tables([remaining, pa.Table.from_batches([batch])]).combine_chunks()
            # The last part may continue in the next batch.
            first_of_last = pc.index(rows["part"], rows["part"][-1]).as_py()
            if first_of_last:
                yield _by_part(rows.slice(0, first_of_last))
            remaining = rows.slice(first_of_last)
        if remaining.num_rows:
            yield _by_part(remaining)


def _by_part(rows: pa.Table) -> pa.RecordBatch:
    """Return the rows of EDITS_ARROW, which are ordered by part, as one row of REWRITE_ARROW per part."""
    rows = rows.combine_chunks()
    runs = pc.run_end_encode(rows["part"].combine_chunks())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), runs.run_ends.cast(pa.int32())])
    lists = [pa.ListArray.from_arrays(offsets, rows[name].combine_chunks()) for name in ("sha256", "split")]
    return pa.RecordBatch.from_arrays([runs.values, *lists], schema=REWRITE_ARROW)


def find_edits(relations: Relations) -> Edits:
    """Choose the parts to commit, once all outcomes are determined."""
    for query in part_queries.CHOICE_OF_PARTS:
        relations.run(query)
    return Edits(dict(relations.rows(part_queries.WHOLE_PARTS)), relations)
