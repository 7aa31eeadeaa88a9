"""Comparison of a source with the tables, the outcome of each file, and the changes to write.

The outcomes are stored, duplicate, quarantined, ignored and deleted.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import CSVWriter

from tasks.etl import comparison_queries
from tasks.etl import outcome_queries as queries
from tasks.etl.choice import IGNORED_ARROW
from tasks.etl.extract import MAX_FILE_BYTES
from tasks.etl.gates import GroupReport
from tasks.etl.groups import Grouping, split_counts
from tasks.etl.stratify import SplitRule, apportion_classes
from tasks.model_package.reasons import Reason
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, QUARANTINED, TO_READ_ARROW, columns_of
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.parts import REWRITE_ARROW
from tasks.tables.relations import Relations
from tasks.text.forms import as_known

READ_AGAIN = (
    Reason.LABEL_CONFLICT.value,
    Reason.SPLIT_CONFLICT.value,
    Reason.UNREADABLE.value,
    Reason.TOO_MANY_PIXELS.value,
    Reason.TOO_SMALL.value,
)
"""Reasons that may disappear without a change of the file: by a change of another file, permissions, or a setting."""

ASSIGNED_ARROW = pa.schema(
    [("label", pa.string()), ("split", pa.string()), ("first", pa.int64()), ("last", pa.int64())]
)
"""Assignment of a class's images to splits, by the rank of the first image and of the last (excluded)."""


FORMS_ARROW = pa.schema([("label", pa.string()), ("form", pa.string())])
"""Labels of a listing that the table has, or gets, in another form of Unicode."""

UNUSABLE_ARROW = columns_of(FILES_ARROW, "path", "label", "reason", "detail")

EDITS_ARROW = pa.schema([("part", pa.string()), ("sha256", pa.string()), ("split", pa.string())])
"""Rows of parts to remove (split is null) or to give another split."""

FILLED_ROWS = 1_000_000
"""Number of rows of an earlier release that one run completes: about 300 MB in memory."""


def _by_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of EDITS_ARROW, which are ordered by part, as one row of REWRITE_ARROW per part."""
    remaining = EDITS_ARROW.empty_table()
    for batch in batches:
        rows = pa.concat_tables([remaining, pa.Table.from_batches([batch])]).combine_chunks()
        # The last part may continue in the next batch.
        first_of_last = pc.index(rows["part"], rows["part"][-1]).as_py()
        if first_of_last:
            yield _by_part(rows.slice(0, first_of_last))
        remaining = rows.slice(first_of_last)
    if remaining.num_rows:
        yield _by_part(remaining)


def _by_part(rows: pa.Table) -> pa.RecordBatch:
    """Return the rows of whole parts as `_by_parts`."""
    rows = rows.combine_chunks()
    runs = pc.run_end_encode(rows["part"].combine_chunks())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), runs.run_ends.cast(pa.int32())])
    lists = [pa.ListArray.from_arrays(offsets, rows[name].combine_chunks()) for name in ("sha256", "split")]
    return pa.RecordBatch.from_arrays([runs.values, *lists], schema=REWRITE_ARROW)


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
        # A query and not a table, since the changes of a first run are as large as the ledger.
        query = f"FROM ({queries.CHANGES}) ORDER BY path"
        return self._relations.batches(query, FILES_ARROW, {"seen_at": self._seen_at})

    def table(self) -> pa.Table:
        """Return the rows as a table in memory."""
        return pa.Table.from_batches(self.batches(), FILES_ARROW)


NONE_IGNORED = ParquetRows((), IGNORED_ARROW)
"""The ignored files of a source that has images alone."""


class Comparison:
    """Comparison of a source's listing with the tables: the outcome of each file, and the changes to write.

    Only the files that changed, and those with the same content, get an outcome anew. That of all others is the
    ledger's: memory and time of most queries depend on the changes, not on the size of the tables.

    Attributes:
        decomposed: Labels of the tables that are not in the composed form of Unicode, as older releases wrote them.
        groups_found: Groups of the images, once outcomes were determined; None without groups or new files.
    """

    def __init__(
        self,
        relations: Relations,
        listing: pa.Table | ParquetRows,
        ledger: pa.Table | ParquetRows,
        existing: pa.Table | ParquetRows,
        *,
        replaced: bool,
        keep_deleted: bool,
        rule: SplitRule | None = None,
        ignored: pa.Table | ParquetRows = NONE_IGNORED,
        grouping: Grouping | None = None,
    ) -> None:
        """Find the paths of the listing or the ledger that are not unchanged.

        Their status is new, again (unchanged, but read again), or gone.

        Args:
            relations: Database for the queries.
            listing: Columns of LISTING_ARROW. A file is new if its label or predefined split differs from the ledger's.
            ledger: Columns of FILES_ARROW; empty if the table does not exist.
            existing: sha256, label and split of every row of `images`. A file with outcome stored or
                duplicate whose image is missing is new: a run was killed between its two commits, or rows were lost.
            replaced: Whether the ledger belongs to another source, so that equal paths and times have no meaning.
            keep_deleted: Whether the images of deleted files are kept.
            rule: Assignment of images without a split; None if splits follow from the content or the listing.
            ignored: The other files of the source (IGNORED_ARROW), which are ignored.
            grouping: Groups of images that have one split; it needs a rule, also where splits follow from the content.
        """
        self._rule = rule
        self._grouping = grouping
        self.groups_found: GroupReport | None = None
        self._replaced = replaced
        self._relations = relations
        named = (("images_listed", listing), ("ignored", ignored), ("ledger", ledger), ("existing", existing))
        for name, rows in named:
            relations.add(name, rows)
        relations.run(comparison_queries.LISTING)
        self.decomposed = self._use_forms_of_table()
        relations.run(f"{comparison_queries.BUCKET_OF}; {queries.DRAW_OF}; {comparison_queries.KNOWN}")
        values = {"read_again": list(READ_AGAIN), "replaced": replaced, "keep": keep_deleted and not replaced}
        chosen = ""
        if not replaced:
            # A file without a predefined split differs here if others have one; below, its split is compared exactly.
            ((has_splits,),) = relations.rows("SELECT count(split) > 0 FROM listing")
            relations.run(comparison_queries.DIFFERING.format(split="split" if has_splits else "NULL"), values)
            chosen = comparison_queries.IN_DIFFERING
        relations.run(comparison_queries.CHANGED.format(chosen=chosen), values)
        relations.run(comparison_queries.NOW_IGNORED)
        relations.run(comparison_queries.KEPT)

    def _count(self, relation: str) -> int:
        return int(self._relations.rows(f"SELECT count(*) FROM {relation}")[0][0])  # noqa: S608  # text of this module

    def _use_forms_of_table(self) -> list[str]:
        """Give labels the form of Unicode that the table has, else the composed form; return the table's other forms.

        Tables of older releases have the forms of the source. Their images keep their labels.
        """
        if not (uncommon := {label for (label,) in self._relations.rows(queries.DECOMPOSED)}):
            return []
        known = set() if self._replaced else {label for (label,) in self._relations.rows(queries.KNOWN_LABELS)}
        form_of = as_known(known)
        listed = [label for (label,) in self._relations.rows("SELECT DISTINCT label FROM listing WHERE label <> ''")]
        forms = [{"label": label, "form": form} for label in listed if (form := form_of(label)) != label]
        self._relations.add("forms", pa.Table.from_pylist(forms, schema=FORMS_ARROW))
        self._relations.run(queries.IMAGES_WITH_FORMS)
        return sorted(uncommon & known)

    def num_new(self) -> int:
        """Return the number of new and changed files, including files that may have been only touched."""
        return self._count("changed WHERE status = 'new'") + self.num_touched()

    def num_touched(self) -> int:
        """Return the number of files of which only inode or time of status change differ from the ledger's."""
        return self._count("touched")

    def is_up_to_date(self) -> bool:
        """Return whether all files are unchanged and `images` has exactly the rows of the stored and kept images."""
        is_settled = self._count("orphans") == self._count("kept")
        return is_settled and not (self._count("changed") or self.num_touched())

    def to_read(self) -> pa.Table:
        """Return the columns of TO_READ_ARROW of the files to read, ordered by path."""
        query = """
            SELECT path, l.label, l.split, l.size, l.modified_at, l.changed_at, l.inode, k.sha256 AS ledger_sha256
            FROM (
                FROM images_now SEMI JOIN (
                    SELECT path FROM changed WHERE status <> 'gone' UNION ALL FROM touched
                ) USING (path)
            ) l LEFT JOIN (FROM known SEMI JOIN touched USING (path)) k USING (path) ORDER BY path
        """
        return self._relations.table(query, TO_READ_ARROW)

    def resolve(self, read: pa.Table | ParquetRows) -> None:
        """Determine the outcome of every file of the source, independently of the order in which files were read.

        Among usable files with the same content, label and split, the first by path is stored and the others are
        duplicates. If their labels or splits differ, all are quarantined. A touched file keeps its outcome if it has
        the ledger's content. So does a file with an image that cannot be read now: the next run tries that again.

        Args:
            read: Columns of READ_ARROW of the files from `to_read`. With a split rule, the column split is only the
                value that a worker wrote into the part, and does not affect the assignment.
        """
        rule = self._rule
        self._relations.add("read_images", read)
        self._relations.run(queries.WITH_IGNORED)
        self._relations.run(queries.READ_FILES, {"max_bytes": MAX_FILE_BYTES, "replaced": self._replaced})
        self._relations.run(
            queries.READ if rule is None else queries.READ_WITH_KNOWN_SPLITS, {"replaced": self._replaced}
        )
        self._relations.run(queries.RESOLUTION, {"seed": 0 if rule is None else rule.seed})
        self._relations.run(comparison_queries.KEPT)
        # Images without a split get one in the order of a hash of seed and content.
        self._relations.run(queries.HELD)
        if self._grouping and rule and self._count("drawn WHERE reason IS NULL"):
            self.groups_found = self._grouping.assign(self._relations, rule, replaced=self._replaced)
        ranges = () if rule is None else apportion_classes(*split_counts(self._relations), rule)
        assigned = [dict(zip(ASSIGNED_ARROW.names, row, strict=True)) for row in ranges]
        self._relations.add("assigned", pa.Table.from_pylist(assigned, schema=ASSIGNED_ARROW))
        self._relations.run(queries.RESOLVED)

    def groups(self) -> list[tuple[str | None, str | None, str, str | None, int]]:
        """Return label, split, outcome, reason and number of files of each group of the source's files."""
        return self._relations.rows("SELECT label, split, outcome, reason, count(*) FROM outcomes GROUP BY ALL")

    def failed_reads(self) -> tuple[int, str, str]:
        """Return the number of files that keep their image although they cannot be read, a path and its error."""
        query = "SELECT count(*), coalesce(min(path), ''), coalesce(arg_min(detail, path), '') FROM failed"
        ((number, path, detail),) = self._relations.rows(query)
        return number, path, detail

    def write_unusable(self, file: Path, most: int) -> list[dict[str, str | None]]:
        """Write the files that cannot be used to a CSV file; return at most so many of them, both ordered by path.

        Returns:
            Rows with path, label, reason and detail.
        """
        first: list[dict[str, str | None]] = []
        values = {"bad": QUARANTINED, "unreadable": Reason.UNREADABLE.value}
        file.parent.mkdir(parents=True, exist_ok=True)
        # Runs of other tables of the home write the same file: whole, the last one wins.
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        with CSVWriter(partial, UNUSABLE_ARROW) as writer:
            for batch in self._relations.batches(queries.UNUSABLE, UNUSABLE_ARROW, values):
                first += batch.slice(0, most - len(first)).to_pylist()
                writer.write_batch(batch)
        os.replace(partial, file)
        return first

    def kept_groups(self) -> list[tuple[str, str, int]]:
        """Return label, split and number of images of each group of the images kept of deleted files."""
        return self._relations.rows("SELECT label, split, count(*) FROM kept GROUP BY ALL")

    def deletions(self) -> tuple[Counter[str], Counter[str]]:
        """Return the numbers of the contents that leave `images`, and of all its images, by label.

        A content that gets another path, label or split does not leave. Both are empty if none leaves, or if the source
        is replaced.
        """
        deleted = Counter(dict(self._relations.rows(queries.DELETIONS))) if not self._replaced else Counter[str]()
        if not deleted:
            return Counter(), Counter()
        return deleted, Counter(dict(self._relations.rows("SELECT label, count(*) FROM existing GROUP BY label")))

    def edits(self) -> tuple[dict[str, int], Iterator[pa.RecordBatch]]:
        """Return which parts contain exactly images to insert, and the changes to the others that have such images.

        Returns:
            Parts that are committed as they are, with their numbers of rows; and the other parts with rows to insert,
            with the columns of REWRITE_ARROW. Rows that are a duplicate in another part, in conflict, or in the table
            already are removed from them.
        """
        self._relations.run(queries.CHOICE_OF_PARTS)
        edits = _by_parts(self._relations.batches(queries.EDITS, EDITS_ARROW))
        return dict(self._relations.rows(queries.WHOLE_PARTS)), edits

    def surplus(self) -> pa.Table:
        """Return sha256 of the rows of `images` that belong to neither a stored nor a kept image."""
        query = """
            SELECT sha256 FROM loose ANTI JOIN (
                FROM resolved_images SEMI JOIN loose USING (sha256) UNION ALL FROM kept
            ) USING (sha256, label, split)
        """
        return self._relations.table(query, columns_of(IMAGE_KEYS_ARROW, "sha256"))

    def num_existing(self) -> int:
        """Return the number of rows of `images` before the run."""
        return self._count("existing")

    def parts_with_moved(self) -> set[str]:
        """Return the names of the parts with an image whose label or split differs from the table's."""
        query = f"""
            SELECT DISTINCT min(part) FROM staged SEMI JOIN ({queries.MOVED}) USING (sha256)
            WHERE part IS NOT NULL GROUP BY sha256, label
        """  # noqa: S608  # a query of this module
        return {part for (part,) in self._relations.rows(query)}

    def ledger_changes(self, seen_at: datetime) -> LedgerChanges:
        """Return the new and changed rows of the ledger, once all outcomes are determined.

        Files that are no longer in the source have the outcome deleted. If there are changes, up to FILLED_ROWS rows of
        an earlier release get the inode and time of status change that they lack.
        """
        values = {"seen_at": seen_at}
        ((num_changes, num_known),) = self._relations.rows(queries.COUNT_CHANGES, values)
        if num_changes and self._relations.rows("SELECT 1 FROM known WHERE inode IS NULL LIMIT 1"):
            self._relations.run(queries.FILL, {"most": FILLED_ROWS})
            ((num_changes, num_known),) = self._relations.rows(queries.COUNT_CHANGES, values)
        return LedgerChanges(num_changes, num_known == 0, self._relations, seen_at)
