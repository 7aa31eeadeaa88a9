"""Comparison of a source with the tables, and the outcome of each file.

The outcomes are stored, duplicate, quarantined and deleted.
"""

from datetime import datetime

import pyarrow as pa

from tasks.decode import Reason
from tasks.etl.stratify import Counts, SplitRule, apportion_classes
from tasks.schema import DELETED, DUPLICATE, FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, QUARANTINED, STORED
from tasks.tables.relations import Relations

READ_AGAIN = (
    Reason.LABEL_CONFLICT.value,
    Reason.SPLIT_CONFLICT.value,
    Reason.UNREADABLE.value,
    Reason.TOO_MANY_PIXELS.value,
    Reason.TOO_SMALL.value,
)
"""Reasons that may disappear without a change of the file: by a change of another file, permissions, or a setting."""

COMPARE = """
CREATE OR REPLACE TABLE compared AS
WITH known AS (FROM ledger WHERE outcome <> $deleted AND NOT $replaced),
paths AS (
    SELECT coalesce(l.path, k.path) AS path, l, k,
        CASE WHEN l.path IS NULL THEN 'gone'
             WHEN l.size = k.size AND l.modified_at = k.modified_at AND l.label IS NOT DISTINCT FROM k.label
                  -- If the split follows from the content, the listing has none and the ledger's is valid.
                  AND coalesce(l.split, k.split) IS NOT DISTINCT FROM k.split THEN 'unchanged'
             ELSE 'new' END AS found,
        EXISTS (FROM existing h WHERE (h.sha256, h.label, h.split) = (k.sha256, k.label, k.split)) AS is_existing
    FROM listing l FULL OUTER JOIN known k ON l.path = k.path
)
SELECT path,
    CASE WHEN found = 'unchanged' AND k.outcome = $stored AND NOT is_existing THEN 'new'
         WHEN found = 'unchanged' AND k.reason IN $read_again THEN 'again'
         ELSE found END AS status,
    -- Files to read have the listing's values, others the ledger's, which has the split that follows from the content.
    CASE WHEN status IN ('new', 'again') THEN l.label ELSE k.label END AS label,
    CASE WHEN status IN ('new', 'again') THEN l.split ELSE k.split END AS split,
    coalesce(l.size, k.size) AS size, coalesce(l.modified_at, k.modified_at) AS modified_at,
    k.sha256, k.outcome, k.reason, k.detail, is_existing
FROM paths
"""

RESOLVE = """
CREATE OR REPLACE TABLE outcomes AS
WITH files AS (
    SELECT path, label, split, size, modified_at, sha256, reason, detail FROM compared WHERE status = 'unchanged'
    UNION ALL
    SELECT path, label, split, size, modified_at, sha256, reason, detail FROM read
),
contents AS (
    SELECT sha256, min(path) AS first, min(label) <> max(label) AS two_labels, min(split) <> max(split) AS two_splits
    FROM files WHERE reason IS NULL GROUP BY sha256
),
-- Lists are built only for the few contents that are in conflict.
conflicts AS (
    SELECT sha256, string_agg(DISTINCT label, ', ' ORDER BY label) AS labels,
        string_agg(DISTINCT split, ', ' ORDER BY split) AS splits
    FROM files SEMI JOIN (FROM contents WHERE two_labels OR two_splits) USING (sha256)
    WHERE reason IS NULL GROUP BY sha256
)
SELECT path, label, split, size, modified_at, f.sha256,
    CASE WHEN reason IS NOT NULL OR two_labels OR two_splits THEN $quarantined
         WHEN path = first THEN $stored
         ELSE $duplicate END AS outcome,
    CASE WHEN reason IS NOT NULL THEN reason
         WHEN two_labels THEN $label_conflict
         WHEN two_splits THEN $split_conflict END AS reason,
    CASE WHEN reason IS NOT NULL THEN detail
         WHEN two_labels THEN 'the same content under the labels ' || labels
         WHEN two_splits THEN 'the same content in the splits ' || splits END AS detail
FROM files f LEFT JOIN contents c ON f.reason IS NULL AND f.sha256 = c.sha256
    LEFT JOIN conflicts x ON c.sha256 = x.sha256
"""

KNOWN_SPLITS = """
CREATE OR REPLACE TABLE known_splits AS
-- The table takes precedence; the ledger has the splits of deleted images and of images in conflict. A content that is
-- in neither is usually an edited image: it gets the split of its path, so that the original keeps it when restored.
SELECT sha256, arg_min(split, rank || split) AS split FROM (
    SELECT sha256, split, '0' AS rank FROM existing
    UNION ALL
    SELECT sha256, split, '1' FROM ledger WHERE split IS NOT NULL
    UNION ALL
    SELECT staged.sha256, ledger.split, '2' FROM staged JOIN ledger USING (path)
    WHERE ledger.split IS NOT NULL AND NOT $replaced
) SEMI JOIN (FROM staged WHERE reason IS NULL) staged USING (sha256) GROUP BY sha256
"""

READ_WITH_KNOWN_SPLITS = """
CREATE OR REPLACE TEMP VIEW read AS
SELECT s.* REPLACE (CASE WHEN reason IS NULL THEN r.split END AS split)
FROM staged s LEFT JOIN known_splits r ON s.sha256 = r.sha256
"""

UNASSIGNED = """
CREATE OR REPLACE TABLE unassigned AS
SELECT sha256, label,
    row_number() OVER (PARTITION BY label ORDER BY sha256(concat($seed, ':', sha256)), sha256) - 1 AS rank
FROM outcomes WHERE outcome = $stored AND split IS NULL
"""

SPLIT_COUNTS = """
SELECT label, split, count(*) FROM (FROM stored WHERE split IS NOT NULL UNION ALL FROM kept) GROUP BY ALL
"""

ASSIGN = """
UPDATE outcomes SET split = assignment.split
FROM (
    SELECT sha256, a.split FROM unassigned u JOIN assigned a
        ON u.label = a.label AND rank >= a.first AND rank < a.last
) assignment
WHERE outcomes.sha256 = assignment.sha256 AND outcomes.split IS NULL AND outcomes.reason IS NULL
"""

ASSIGNED_ARROW = pa.schema(
    [("label", pa.string()), ("split", pa.string()), ("first", pa.int64()), ("last", pa.int64())]
)
"""Assignment of a class's images to splits, by the rank of the first image and of the last (excluded)."""

STORED_IMAGES = "CREATE OR REPLACE VIEW stored AS SELECT sha256, label, split FROM outcomes WHERE outcome = 'stored'"

KEPT = """
CREATE OR REPLACE TABLE kept AS
FROM existing SEMI JOIN (
    FROM ledger ANTI JOIN listing USING (path) ANTI JOIN live ON ledger.sha256 = live.sha256
) USING (sha256, label, split)
WHERE $keep
"""

CHANGES = """
SELECT *, $seen_at::TIMESTAMPTZ AS seen_at FROM (
    FROM outcomes o ANTI JOIN ledger l ON o.path = l.path AND o.size = l.size AND o.modified_at = l.modified_at
        AND o.outcome = l.outcome AND o.label IS NOT DISTINCT FROM l.label AND o.split IS NOT DISTINCT FROM l.split
        AND o.sha256 IS NOT DISTINCT FROM l.sha256 AND o.reason IS NOT DISTINCT FROM l.reason
        AND o.detail IS NOT DISTINCT FROM l.detail
    UNION ALL
    SELECT path, label, split, size, modified_at, sha256, $deleted, NULL, NULL
    FROM ledger ANTI JOIN outcomes USING (path) WHERE outcome <> $deleted
) ORDER BY path
"""

ALL_ARE_INSERTED = """
SELECT (SELECT count(*) FROM staged WHERE part IS NOT NULL)
    = (SELECT count(*) FROM stored ANTI JOIN existing USING (sha256, label, split))
"""

WHOLE_PARTS = "SELECT part, count(*), NULL FROM staged WHERE part IS NOT NULL GROUP BY part ORDER BY part"

PARTS = """
-- A content with two predefined splits is in conflict and not stored, so sha256 and label identify an image.
WITH images AS (SELECT DISTINCT sha256, label, split, part FROM staged WHERE part IS NOT NULL),
firsts AS (SELECT sha256, label, min(part) AS part FROM images GROUP BY ALL),
missing AS (FROM stored ANTI JOIN existing USING (sha256, label, split)),
wanted AS (FROM firsts SEMI JOIN missing USING (sha256, label))
SELECT part, count(*),
    CASE WHEN count(w.sha256) < count(*) THEN list(w.sha256 ORDER BY w.sha256) FILTER (w.sha256 IS NOT NULL) END
FROM images LEFT JOIN wanted w USING (sha256, label, part)
GROUP BY part HAVING count(w.sha256) > 0 ORDER BY part
"""

REASSIGNED = """
SELECT part, list(sha256), list(split) FROM (
    SELECT DISTINCT s.part, s.sha256, o.split FROM staged s JOIN stored o ON s.sha256 = o.sha256 AND s.label = o.label
    WHERE s.part IS NOT NULL AND s.split <> o.split
) GROUP BY part
"""


MOVED = "SELECT sha256 FROM existing ANTI JOIN stored USING (sha256, label, split) SEMI JOIN stored USING (sha256)"
"""Query of the sha256 of rows of `images` whose label or split changes."""


class Comparison:
    """Comparison of a source's listing with the tables: the outcome of each file, and the changes to write."""

    def __init__(
        self,
        relations: Relations,
        listing: pa.Table,
        ledger: pa.Table,
        existing: pa.Table,
        *,
        replaced: bool,
        keep_deleted: bool,
        rule: SplitRule | None = None,
    ) -> None:
        """Compute the status of every path of the listing or the ledger.

        The status is new, again (unchanged, but read again), unchanged, or gone.

        Args:
            relations: Database for the queries.
            listing: Columns of LISTING_ARROW. A file is new if its label or predefined split differs from the ledger's.
            ledger: Columns of FILES_ARROW; empty if the table does not exist.
            existing: sha256, label and split of every row of `images`. A file with outcome stored whose image is
                missing is new: a run was killed between its two commits, or the table was lost.
            replaced: Whether the ledger belongs to another source, so that equal paths and times have no meaning.
            keep_deleted: Whether the images of deleted files are kept.
            rule: Assignment of images without a split; None if splits follow from the content or the listing.
        """
        self._rule = rule
        self._replaced = replaced
        self._keep = keep_deleted and not replaced
        self._relations = relations
        for name, rows in (("listing", listing), ("ledger", ledger), ("existing", existing)):
            self._relations.add(name, rows)
        names = {"deleted": DELETED, "stored": STORED, "read_again": list(READ_AGAIN)}
        self._relations.run(COMPARE, names | {"replaced": replaced})
        self._relations.run("CREATE OR REPLACE VIEW live AS SELECT sha256 FROM compared WHERE status = 'unchanged'")
        self._relations.run(KEPT, {"keep": self._keep})

    def num_new(self) -> int:
        """Return the number of new and changed files."""
        return int(self._relations.rows("SELECT count(*) FROM compared WHERE status = 'new'")[0][0])

    def is_up_to_date(self) -> bool:
        """Return whether all files are unchanged and `images` has exactly the rows of the stored and kept images."""
        query = """
            SELECT (SELECT count(*) FROM compared WHERE status <> 'unchanged') = 0
               AND (SELECT count(*) FROM compared WHERE outcome = $stored AND is_existing)
                   + (SELECT count(*) FROM kept) = (SELECT count(*) FROM existing)
        """
        return bool(self._relations.rows(query, {"stored": STORED})[0][0])

    def to_read(self) -> pa.Table:
        """Return the columns of LISTING_ARROW of the files to read, ordered by path."""
        query = """
            SELECT path, label, split, size, modified_at FROM compared WHERE status IN ('new', 'again') ORDER BY path
        """
        return self._relations.table(query, LISTING_ARROW)

    def resolve(self, read: pa.Table) -> None:
        """Compute the outcome of every file of the source, independently of the order in which files were read.

        Among usable files with the same content, label and split, the first by path is stored and the others are
        duplicates. If their labels or splits differ, all are quarantined.

        Args:
            read: Columns of READ_ARROW of the files from `to_read`. With a split rule, the column split is only the
                value that a worker wrote into the part, and does not affect the assignment.
        """
        self._relations.add("staged", read)
        if self._rule is None:
            self._relations.run("CREATE OR REPLACE TEMP VIEW read AS FROM staged")
        else:
            self._relations.run(KNOWN_SPLITS, {"replaced": self._replaced})
            self._relations.run(READ_WITH_KNOWN_SPLITS)
        names = {"stored": STORED, "duplicate": DUPLICATE, "quarantined": QUARANTINED}
        conflicts = {"label_conflict": Reason.LABEL_CONFLICT.value, "split_conflict": Reason.SPLIT_CONFLICT.value}
        self._relations.run(RESOLVE, names | conflicts)
        # An image of a deleted file is not kept if a file of the source has the same content: that file's label counts.
        self._relations.run("CREATE OR REPLACE VIEW live AS SELECT sha256 FROM outcomes")
        self._relations.run(KEPT, {"keep": self._keep})
        self._relations.run(STORED_IMAGES)
        if self._rule is not None:
            self._assign_splits(self._rule)

    def _assign_splits(self, rule: SplitRule) -> None:
        """Assign splits to the images without one, in the order of a hash of seed and content."""
        self._relations.run(UNASSIGNED, {"seed": rule.seed, "stored": STORED})
        new = dict(self._relations.rows("SELECT label, count(*) FROM unassigned GROUP BY label"))
        if not new:
            return
        existing: dict[str, Counts] = {}
        for label, split, number in self._relations.rows(SPLIT_COUNTS):
            existing.setdefault(label, {})[split] = number
        assigned = [dict(zip(ASSIGNED_ARROW.names, row, strict=True)) for row in apportion_classes(existing, new, rule)]
        self._relations.add("assigned", pa.Table.from_pylist(assigned, schema=ASSIGNED_ARROW))
        self._relations.run(ASSIGN)

    def groups(self) -> list[tuple[str | None, str | None, str, str | None, int]]:
        """Return label, split, outcome, reason and number of files of each group of the source's files."""
        return self._relations.rows("SELECT label, split, outcome, reason, count(*) FROM outcomes GROUP BY ALL")

    def kept_groups(self) -> list[tuple[str, str, int]]:
        """Return label, split and number of images of each group of the images kept of deleted files."""
        return self._relations.rows("SELECT label, split, count(*) FROM kept GROUP BY ALL")

    def parts(self) -> list[tuple[str, int, list[str] | None]]:
        """Return name, number of rows and sha256 of the rows to insert of every part that has such rows.

        The sha256 are None if all rows of the part are to be inserted. Rows that are a duplicate in another part, in
        conflict, or in the table already are not inserted.
        """
        # With equal counts, every image in a part is to be inserted, since every image to insert is in a part.
        ((all_are,),) = self._relations.rows(ALL_ARE_INSERTED)
        return self._relations.rows(WHOLE_PARTS if all_are else PARTS)

    def reassigned(self) -> dict[str, tuple[list[str], list[str]]]:
        """Return, by part, sha256 and assigned split of the images whose split differs from the one in the part."""
        if self._rule is None:
            return {}
        return {part: (contents, splits) for part, contents, splits in self._relations.rows(REASSIGNED)}

    def surplus(self) -> pa.Table:
        """Return sha256 of the rows of `images` that belong to neither a stored nor a kept image."""
        query = "SELECT sha256 FROM existing ANTI JOIN (FROM stored UNION ALL FROM kept) USING (sha256, label, split)"
        return self._relations.table(query, pa.schema([IMAGE_KEYS_ARROW.field("sha256")]))

    def moved(self) -> pa.Table:
        """Return sha256 of the rows of `images` whose label or split changes."""
        return self._relations.table(MOVED, pa.schema([IMAGE_KEYS_ARROW.field("sha256")]))

    def parts_with_moved(self) -> set[str]:
        """Return the names of the parts with an image whose label or split differs from the table's."""
        query = f"""
            SELECT DISTINCT min(part) FROM staged SEMI JOIN ({MOVED}) USING (sha256)
            WHERE part IS NOT NULL GROUP BY sha256, label
        """  # noqa: S608  # a query of this module
        return {part for (part,) in self._relations.rows(query)}

    def ledger_changes(self, seen_at: datetime) -> tuple[pa.Table, bool]:
        """Return the new and changed rows of the ledger (columns of FILES_ARROW), and whether all have new paths.

        Files that are no longer in the source have the outcome deleted.
        """
        changes = self._relations.table(CHANGES, FILES_ARROW, {"deleted": DELETED, "seen_at": seen_at})
        self._relations.add("changes", changes)
        ((num_known,),) = self._relations.rows("SELECT count(*) FROM changes SEMI JOIN ledger USING (path)")
        return changes, num_known == 0
