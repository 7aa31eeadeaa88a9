"""SQL queries of the comparison of a source with the tables.

Views and tables, in the order of their creation:

- listing, ledger, existing: the files of the source, and the rows of the tables `files` and `images`.
- known: rows of the ledger whose file was in the source at the last run.
- changed: paths with a status, new, again (unchanged, but read again) or gone. The others are unchanged.
- orphans: rows of `images` without an unchanged stored file.
- absent, kept: images of deleted files, and those of them that stay in the table.
- staged, read: rows of the files that were read.
- affected: contents whose files may get another outcome.
- resolved: files with such a content and their outcomes.
- outcomes, stored: all files and their outcomes, and the stored images.
- loose: rows of `images` that may be deleted.
- missing: images to insert.
- wanted: images to insert, each with the first part that has it.
- parts: parts with images to insert, and their numbers of rows.
- unwanted: images in these parts that are not to be inserted.
- reassigned: images in parts whose assigned split differs from the split in the part.
- changes: rows to write to the ledger.
"""

KNOWN = "CREATE OR REPLACE VIEW known AS FROM ledger WHERE outcome <> 'deleted'"

CHANGED = """
CREATE OR REPLACE TABLE changed AS
SELECT coalesce(l.path, k.path) AS path,
    coalesce(
        NOT $replaced AND l.size = k.size AND l.modified_at = k.modified_at AND l.label IS NOT DISTINCT FROM k.label
        -- If the split follows from the content, the listing has none and the ledger's is valid.
        AND coalesce(l.split, k.split) IS NOT DISTINCT FROM k.split, false) AS is_same,
    CASE WHEN l.path IS NULL THEN 'gone' WHEN is_same THEN 'again' ELSE 'new' END AS status
FROM listing l FULL OUTER JOIN (
    SELECT path, label, split, size, modified_at, coalesce(reason IN $read_again, false) AS read_again FROM known
) k ON l.path = k.path
WHERE NOT is_same OR k.read_again
"""

LOST = """
INSERT INTO changed SELECT path, true, 'new' FROM known ANTI JOIN existing USING (sha256, label, split)
    ANTI JOIN changed USING (path) WHERE outcome = $stored
"""

UNCHANGED = "CREATE OR REPLACE VIEW unchanged AS FROM known ANTI JOIN changed USING (path)"

ORPHANS = """
CREATE OR REPLACE TABLE orphans AS
FROM existing ANTI JOIN (FROM unchanged WHERE outcome = $stored) USING (sha256, label, split)
"""

ABSENT = """
CREATE OR REPLACE TABLE absent AS
SELECT sha256, label, split FROM ledger ANTI JOIN listing USING (path) WHERE $keep
"""

AFFECTED = """
CREATE OR REPLACE TABLE affected AS
SELECT DISTINCT sha256 FROM (
    SELECT sha256 FROM staged UNION ALL SELECT sha256 FROM ledger SEMI JOIN changed USING (path)
) WHERE sha256 IS NOT NULL
"""

RESOLVE = """
CREATE OR REPLACE TABLE resolved AS
WITH files AS (
    SELECT path, label, split, size, modified_at, sha256, reason, detail
    FROM unchanged SEMI JOIN affected USING (sha256)
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
FROM resolved WHERE outcome = $stored AND split IS NULL
"""

SPLIT_COUNTS = """
SELECT label, split, count(*) FROM (FROM stored WHERE split IS NOT NULL UNION ALL FROM kept) GROUP BY ALL
"""

ASSIGN = """
-- A new table, since an UPDATE holds its changes in memory.
CREATE OR REPLACE TABLE resolved_with_splits AS
SELECT r.* REPLACE (coalesce(r.split, a.split) AS split)
FROM resolved r LEFT JOIN (
    SELECT sha256, assigned.split FROM unassigned JOIN assigned
        ON unassigned.label = assigned.label AND rank >= assigned.first AND rank < assigned.last
) a ON r.sha256 = a.sha256 AND r.reason IS NULL;
DROP TABLE resolved;
ALTER TABLE resolved_with_splits RENAME TO resolved;
"""

OUTCOMES = """
CREATE OR REPLACE VIEW outcomes AS
SELECT path, label, split, size, modified_at, sha256, outcome, reason, detail
FROM unchanged ANTI JOIN affected USING (sha256) UNION ALL FROM resolved
"""

STORED_IMAGES = "CREATE OR REPLACE VIEW stored AS SELECT sha256, label, split FROM outcomes WHERE outcome = 'stored'"

ASSIGNED_IMAGES = """
CREATE OR REPLACE VIEW resolved_images AS SELECT sha256, label, split FROM resolved WHERE outcome = 'stored'
"""

KEPT = """
CREATE OR REPLACE TABLE kept AS
FROM existing SEMI JOIN (FROM absent ANTI JOIN (FROM live SEMI JOIN absent USING (sha256)) USING (sha256))
    USING (sha256, label, split)
"""

LOOSE = """
CREATE OR REPLACE TABLE loose AS
FROM existing SEMI JOIN affected USING (sha256) UNION ALL FROM orphans ANTI JOIN affected USING (sha256)
"""

CHANGES = """
CREATE OR REPLACE TABLE changes AS
SELECT *, $seen_at::TIMESTAMPTZ AS seen_at FROM (
    FROM resolved o ANTI JOIN (FROM ledger SEMI JOIN resolved USING (path)) l
        ON o.path = l.path AND o.size = l.size AND o.modified_at = l.modified_at
        AND o.outcome = l.outcome AND o.label IS NOT DISTINCT FROM l.label AND o.split IS NOT DISTINCT FROM l.split
        AND o.sha256 IS NOT DISTINCT FROM l.sha256 AND o.reason IS NOT DISTINCT FROM l.reason
        AND o.detail IS NOT DISTINCT FROM l.detail
    UNION ALL
    SELECT path, label, split, size, modified_at, sha256, $deleted, NULL, NULL
    FROM known SEMI JOIN (FROM changed WHERE status = 'gone') USING (path)
)
"""

MISSING = "CREATE OR REPLACE VIEW missing AS FROM resolved_images ANTI JOIN loose USING (sha256, label, split)"

ALL_ARE_INSERTED = """
SELECT (SELECT count(*) FROM staged WHERE part IS NOT NULL) = (SELECT count(*) FROM missing)
"""

ALL_PARTS = """
CREATE OR REPLACE TABLE parts AS
SELECT part, count(*) AS num_rows FROM staged WHERE part IS NOT NULL GROUP BY part
"""

NONE_UNWANTED = "CREATE OR REPLACE TABLE unwanted AS SELECT part, sha256 FROM staged LIMIT 0"

WANTED = """
CREATE OR REPLACE TABLE wanted AS
SELECT sha256, min(part) AS part FROM staged SEMI JOIN missing USING (sha256, label)
WHERE part IS NOT NULL GROUP BY sha256
"""

PARTS = "CREATE OR REPLACE TABLE parts AS SELECT part, count(*) AS num_rows FROM wanted GROUP BY part"

UNWANTED = """
CREATE OR REPLACE TABLE unwanted AS
SELECT DISTINCT part, sha256 FROM staged SEMI JOIN parts USING (part) ANTI JOIN wanted USING (part, sha256)
"""

REASSIGNED = """
CREATE OR REPLACE TABLE reassigned AS
SELECT DISTINCT s.part, s.sha256, o.split
FROM staged s JOIN resolved_images o ON s.sha256 = o.sha256 AND s.label = o.label
WHERE s.part IS NOT NULL AND s.split <> o.split
"""

NONE_REASSIGNED = "CREATE OR REPLACE TABLE reassigned AS SELECT part, sha256, split FROM staged LIMIT 0"

WHOLE_PARTS = """
SELECT part, num_rows FROM parts
WHERE part NOT IN (SELECT part FROM unwanted UNION ALL SELECT part FROM reassigned) ORDER BY part
"""

EDITS = """
SELECT part, sha256, split FROM (
    SELECT part, sha256, NULL AS split FROM unwanted
    UNION ALL
    SELECT part, sha256, split FROM reassigned ANTI JOIN unwanted USING (part, sha256)
) SEMI JOIN parts USING (part) ORDER BY part, sha256
"""


MOVED = """
SELECT sha256 FROM loose ANTI JOIN resolved_images USING (sha256, label, split)
    SEMI JOIN (FROM stored SEMI JOIN loose USING (sha256)) USING (sha256)
"""
"""sha256 of the rows of `images` whose label or split changes."""
