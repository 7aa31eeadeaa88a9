"""What became of every file: the source compared with the tables, and the outcome of each file, order aside."""

from datetime import datetime

import pyarrow as pa

from tasks.decode import Reason
from tasks.etl.stratify import Counts, SplitRule, deal_classes
from tasks.schema import DELETED, DUPLICATE, FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, QUARANTINED, STORED
from tasks.tables.relations import Relations

READ_AGAIN = (
    Reason.LABEL_CONFLICT.value,
    Reason.SPLIT_CONFLICT.value,
    Reason.UNREADABLE.value,
    Reason.TOO_MANY_PIXELS.value,
    Reason.TOO_SMALL.value,
)
"""Reasons that something other than the file can settle: its other side, its permissions, a setting."""

COMPARE = """
CREATE OR REPLACE TABLE compared AS
WITH known AS (FROM ledger WHERE outcome <> $deleted AND NOT $replaced),
paths AS (
    SELECT coalesce(l.path, k.path) AS path, l, k,
        CASE WHEN l.path IS NULL THEN 'gone'
             WHEN l.size = k.size AND l.modified_at = k.modified_at AND l.label IS NOT DISTINCT FROM k.label
                  -- Where the content decides, the listing has no split and the ledger's holds.
                  AND coalesce(l.split, k.split) IS NOT DISTINCT FROM k.split THEN 'unchanged'
             ELSE 'new' END AS found,
        EXISTS (FROM held h WHERE (h.sha256, h.label, h.split) = (k.sha256, k.label, k.split)) AS is_held
    FROM listing l FULL OUTER JOIN known k ON l.path = k.path
)
SELECT path,
    CASE WHEN found = 'unchanged' AND k.outcome = $stored AND NOT is_held THEN 'new'
         WHEN found = 'unchanged' AND k.reason IN $read_again THEN 'again'
         ELSE found END AS status,
    -- Of what is read the source says it, of the rest the ledger: it has the split that the content decided.
    CASE WHEN status IN ('new', 'again') THEN l.label ELSE k.label END AS label,
    CASE WHEN status IN ('new', 'again') THEN l.split ELSE k.split END AS split,
    coalesce(l.size, k.size) AS size, coalesce(l.modified_at, k.modified_at) AS modified_at,
    k.sha256, k.outcome, k.reason, k.detail, is_held
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
-- Only of the few that need them, lists are made.
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

REMEMBERED = """
CREATE OR REPLACE TABLE remembered AS
-- The table knows best; of an image that was deleted, or is in conflict, the ledger knows. A content that neither knows
-- is mostly an edit of what its path held: on the same side, so that the original finds its own when it is restored.
SELECT sha256, arg_min(split, rank || split) AS split FROM (
    SELECT sha256, split, '0' AS rank FROM held
    UNION ALL
    SELECT sha256, split, '1' FROM ledger WHERE split IS NOT NULL
    UNION ALL
    SELECT staged.sha256, ledger.split, '2' FROM staged JOIN ledger USING (path)
    WHERE ledger.split IS NOT NULL AND NOT $replaced
) SEMI JOIN (FROM staged WHERE reason IS NULL) staged USING (sha256) GROUP BY sha256
"""

READ_AS_REMEMBERED = """
CREATE OR REPLACE TEMP VIEW read AS
SELECT s.* REPLACE (CASE WHEN reason IS NULL THEN r.split END AS split)
FROM staged s LEFT JOIN remembered r ON s.sha256 = r.sha256
"""

UNDEALT = """
CREATE OR REPLACE TABLE undealt AS
SELECT sha256, label,
    row_number() OVER (PARTITION BY label ORDER BY sha256(concat($seed, ':', sha256)), sha256) - 1 AS rank
FROM outcomes WHERE outcome = $stored AND split IS NULL
"""

HAVE_SPLITS = """
SELECT label, split, count(*) FROM (FROM stored WHERE split IS NOT NULL UNION ALL FROM kept) GROUP BY ALL
"""

DEAL = """
UPDATE outcomes SET split = got.split
FROM (SELECT sha256, d.split FROM undealt u JOIN dealt d ON u.label = d.label AND rank >= d.first AND rank < d.last) got
WHERE outcomes.sha256 = got.sha256 AND outcomes.split IS NULL AND outcomes.reason IS NULL
"""

DEALT_ARROW = pa.schema([("label", pa.string()), ("split", pa.string()), ("first", pa.int64()), ("last", pa.int64())])
"""Which split the images of a class get, by the rank of the first and the last (excluded)."""

STORED_IMAGES = "CREATE OR REPLACE VIEW stored AS SELECT sha256, label, split FROM outcomes WHERE outcome = 'stored'"

KEPT = """
CREATE OR REPLACE TABLE kept AS
FROM held SEMI JOIN (
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
    = (SELECT count(*) FROM stored ANTI JOIN held USING (sha256, label, split))
"""

WHOLE_PARTS = "SELECT part, count(*), NULL FROM staged WHERE part IS NOT NULL GROUP BY part ORDER BY part"

PARTS = """
-- Two predefined splits of one content are a conflict, of which nothing is stored: without them an image is the same.
WITH images AS (SELECT DISTINCT sha256, label, split, part FROM staged WHERE part IS NOT NULL),
firsts AS (SELECT sha256, label, min(part) AS part FROM images GROUP BY ALL),
missing AS (FROM stored ANTI JOIN held USING (sha256, label, split)),
wanted AS (FROM firsts SEMI JOIN missing USING (sha256, label))
SELECT part, count(*),
    CASE WHEN count(w.sha256) < count(*) THEN list(w.sha256 ORDER BY w.sha256) FILTER (w.sha256 IS NOT NULL) END
FROM images LEFT JOIN wanted w USING (sha256, label, part)
GROUP BY part HAVING count(w.sha256) > 0 ORDER BY part
"""

DEALT_OTHERWISE = """
SELECT part, list(sha256), list(split) FROM (
    SELECT DISTINCT s.part, s.sha256, o.split FROM staged s JOIN stored o ON s.sha256 = o.sha256 AND s.label = o.label
    WHERE s.part IS NOT NULL AND s.split <> o.split
) GROUP BY part
"""


MOVED = "SELECT sha256 FROM held ANTI JOIN stored USING (sha256, label, split) SEMI JOIN stored USING (sha256)"
"""sha256 of the rows of `images` that have another label or split now."""


class Comparison:
    """The files of a source, as they are listed, as the tables know them, and as they were read."""

    def __init__(
        self,
        relations: Relations,
        listing: pa.Table,
        ledger: pa.Table,
        held: pa.Table,
        *,
        replaced: bool,
        keep_deleted: bool,
        rule: SplitRule | None = None,
    ) -> None:
        """Give every path of the listing or the ledger its status.

        That is new, again (unchanged, but read again), unchanged, or gone.

        Args:
            relations: Where it is done.
            listing: Columns of LISTING_ARROW. Another label or predefined split than the ledger's makes a file new.
            ledger: Columns of FILES_ARROW; without a row where there is no table.
            held: sha256, label and split of every row of `images`. A file that the ledger calls stored and whose
                image is not there is new: a run was killed between its two commits, or somebody lost the table.
            replaced: Whether the ledger is of another source, where equal paths and times mean nothing.
            keep_deleted: Whether images stay though their files are deleted.
            rule: How images that have no split yet are dealt; None where a file's content or the listing decides.
        """
        self._rule = rule
        self._replaced = replaced
        self._keep = keep_deleted and not replaced
        self._relations = relations
        for name, rows in (("listing", listing), ("ledger", ledger), ("held", held)):
            self._relations.add(name, rows)
        names = {"deleted": DELETED, "stored": STORED, "read_again": list(READ_AGAIN)}
        self._relations.run(COMPARE, names | {"replaced": replaced})
        self._relations.run("CREATE OR REPLACE VIEW live AS SELECT sha256 FROM compared WHERE status = 'unchanged'")
        self._relations.run(KEPT, {"keep": self._keep})

    def num_new(self) -> int:
        """Return how many files are new or changed."""
        return int(self._relations.rows("SELECT count(*) FROM compared WHERE status = 'new'")[0][0])

    def is_in_line(self) -> bool:
        """Say whether every file is unchanged, every image held, and nothing held that nothing stands for."""
        query = """
            SELECT (SELECT count(*) FROM compared WHERE status <> 'unchanged') = 0
               AND (SELECT count(*) FROM compared WHERE outcome = $stored AND is_held)
                   + (SELECT count(*) FROM kept) = (SELECT count(*) FROM held)
        """
        return bool(self._relations.rows(query, {"stored": STORED})[0][0])

    def to_read(self) -> pa.Table:
        """Return the columns of LISTING_ARROW of the files to read, by path."""
        query = """
            SELECT path, label, split, size, modified_at FROM compared WHERE status IN ('new', 'again') ORDER BY path
        """
        return self._relations.table(query, LISTING_ARROW)

    def resolve(self, read: pa.Table) -> None:
        """Give every file of the source its outcome; it does not depend on the order in which files arrived.

        Of sound files with one content, label and split the first by path is stored and the others are duplicates;
        with more than one label or split all are quarantined.

        Args:
            read: Columns of READ_ARROW of the files that were to be read. Where images are dealt, their split is what
                a worker wrote into their part, and nothing else depends on it.
        """
        self._relations.add("staged", read)
        if self._rule is None:
            self._relations.run("CREATE OR REPLACE TEMP VIEW read AS FROM staged")
        else:
            self._relations.run(REMEMBERED, {"replaced": self._replaced})
            self._relations.run(READ_AS_REMEMBERED)
        names = {"stored": STORED, "duplicate": DUPLICATE, "quarantined": QUARANTINED}
        conflicts = {"label_conflict": Reason.LABEL_CONFLICT.value, "split_conflict": Reason.SPLIT_CONFLICT.value}
        self._relations.run(RESOLVE, names | conflicts)
        # Where the content of a deleted file is back, the files that have it decide.
        self._relations.run("CREATE OR REPLACE VIEW live AS SELECT sha256 FROM outcomes")
        self._relations.run(KEPT, {"keep": self._keep})
        self._relations.run(STORED_IMAGES)
        if self._rule is not None:
            self._deal(self._rule)

    def _deal(self, rule: SplitRule) -> None:
        """Give the images that have no split yet their own, in the order of a hash of seed and content."""
        self._relations.run(UNDEALT, {"seed": rule.seed, "stored": STORED})
        new = dict(self._relations.rows("SELECT label, count(*) FROM undealt GROUP BY label"))
        if not new:
            return
        held: dict[str, Counts] = {}
        for label, split, number in self._relations.rows(HAVE_SPLITS):
            held.setdefault(label, {})[split] = number
        dealt = [dict(zip(DEALT_ARROW.names, row, strict=True)) for row in deal_classes(held, new, rule)]
        self._relations.add("dealt", pa.Table.from_pylist(dealt, schema=DEALT_ARROW))
        self._relations.run(DEAL)

    def groups(self) -> list[tuple[str | None, str | None, str, str | None, int]]:
        """Return label, split, outcome, reason and number of the source's files."""
        return self._relations.rows("SELECT label, split, outcome, reason, count(*) FROM outcomes GROUP BY ALL")

    def kept_groups(self) -> list[tuple[str, str, int]]:
        """Return label, split and number of the images that stay though their files are deleted."""
        return self._relations.rows("SELECT label, split, count(*) FROM kept GROUP BY ALL")

    def parts(self) -> list[tuple[str, int, list[str] | None]]:
        """Return name and number of rows of every part with rows to insert, and where these are not all, their sha256.

        A row is not to be inserted that is a duplicate in another part, of a conflict, or in the table already.
        """
        # Then every file that was read is an image to insert, since every such image was read.
        ((all_are,),) = self._relations.rows(ALL_ARE_INSERTED)
        return self._relations.rows(WHOLE_PARTS if all_are else PARTS)

    def dealt_otherwise(self) -> dict[str, tuple[list[str], list[str]]]:
        """Return, by part, sha256 and split of the images that were dealt another split than is written there."""
        if self._rule is None:
            return {}
        return {part: (contents, splits) for part, contents, splits in self._relations.rows(DEALT_OTHERWISE)}

    def surplus(self) -> pa.Table:
        """Return sha256 of the rows of `images` that no file and no image to keep stands for."""
        query = "SELECT sha256 FROM held ANTI JOIN (FROM stored UNION ALL FROM kept) USING (sha256, label, split)"
        return self._relations.table(query, pa.schema([IMAGE_KEYS_ARROW.field("sha256")]))

    def moved(self) -> pa.Table:
        """Return sha256 of the rows of `images` that have another label or split now."""
        return self._relations.table(MOVED, pa.schema([IMAGE_KEYS_ARROW.field("sha256")]))

    def parts_with_moved(self) -> set[str]:
        """Return the names of the parts with an image that has another label or split in the table."""
        query = f"""
            SELECT DISTINCT min(part) FROM staged SEMI JOIN ({MOVED}) USING (sha256)
            WHERE part IS NOT NULL GROUP BY sha256, label
        """  # noqa: S608  # a query of this module
        return {part for (part,) in self._relations.rows(query)}

    def ledger_changes(self, seen_at: datetime) -> tuple[pa.Table, bool]:
        """Return the rows (columns of FILES_ARROW) that the ledger lacks, and whether all of them are of new paths.

        A file that is gone is called deleted.
        """
        changes = self._relations.table(CHANGES, FILES_ARROW, {"deleted": DELETED, "seen_at": seen_at})
        self._relations.add("changes", changes)
        ((num_known,),) = self._relations.rows("SELECT count(*) FROM changes SEMI JOIN ledger USING (path)")
        return changes, num_known == 0
