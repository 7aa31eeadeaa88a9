"""SQL queries of the outcomes of files that were read, and of all with the same content.

The right side of a join, of which DuckDB builds a hash table, is usually small, or cut to the rows that matter.

Views and tables, in the order of their creation, after those of `comparison_queries`:

- failed: files with an image of the table that cannot be read now. They count as unchanged: their image stays.
- refreshed: touched files with the same content, with their new inodes and times of status change.
- staged, read: rows of the other files that were read, without touched files that are gone.
- affected: hashes of the contents whose files may get another outcome.
- recalled, candidates: unchanged files with such a content, and all files with such a content.
- repeated: hashes of the contents of several candidates.
- contents, conflicts: these contents, and those of them under several labels or splits.
- resolving: the candidates and their outcomes, without the splits that are assigned now.
- loose: rows of `images` that may be deleted.
- others: all other files and their outcomes.
- drawn: as resolving, with the draws.
- held: images that the table will have, without the splits that are assigned now.
- bounds: the range of draws of each split of a class.
- resolved: the candidates and their outcomes; is_moved if the split differs from the split in the part.
- outcomes, stored: the outcomes of all files, and the stored images.
- fillable: buckets of paths whose rows in the ledger lack an inode; they become `refreshed` with the next changes.

Of the parts to commit, and of the rows to change in them:

- ambiguous_hashes: hashes of the contents that may be in several parts, or in the table already.
- ambiguous_rows, resolved_rows: rows in parts with such a content, and stored images with such a content.
- rows_to_insert: of these, images to insert, each with the first part that has it.
- parts: parts with images to insert, and their numbers of rows.
- rows_to_drop: images in these parts that are not to be inserted.
- moved_in_parts, reassigned: images whose assigned split differs from the split in the part, and their parts.
"""

from tasks.model_package.reasons import Reason
from tasks.schema import DUPLICATE, IGNORED, QUARANTINED, STORED

KNOWN_LABELS = """
SELECT label FROM ledger WHERE label <> '' UNION SELECT label FROM existing WHERE label <> ''
"""

DECOMPOSED = f"""
SELECT label FROM (SELECT DISTINCT label FROM listing WHERE label <> '' UNION {KNOWN_LABELS})
WHERE label <> nfc_normalize(label)
"""  # noqa: S608  # text of this module
"""Labels that are not in the composed form of Unicode."""

IMAGES_WITH_FORMS = """
CREATE OR REPLACE TEMP VIEW images_now AS
SELECT i.* REPLACE (coalesce(forms.form, i.label) AS label) FROM images_listed i LEFT JOIN forms USING (label)
"""

WITH_IGNORED = f"""
CREATE OR REPLACE TEMP VIEW read_rows AS
FROM read_images UNION ALL BY NAME
SELECT path, NULL AS label, NULL AS split, size, modified_at, changed_at, inode, NULL AS ledger_sha256, NULL AS sha256,
    NULL AS part, '{Reason.OTHER_FILE.value}' AS reason, detail, false AS read_failed
FROM ignored SEMI JOIN (FROM changed WHERE status <> 'gone') USING (path)
"""  # noqa: S608  # constants

READ_FILES = """
CREATE OR REPLACE TABLE failed AS
WITH unread AS (
    SELECT path, sha256, label, split, r.detail FROM known k JOIN (
        -- A larger file is never read: it is not the one that was ingested.
        SELECT path, detail FROM read_rows WHERE read_failed AND size <= $max_bytes AND NOT $replaced
    ) r USING (path) WHERE k.reason IS NULL
)
SELECT path, detail FROM unread
SEMI JOIN (FROM existing SEMI JOIN unread USING (sha256)) USING (sha256, label, split);

CREATE OR REPLACE TABLE refreshed AS
SELECT path, changed_at, inode FROM read_rows WHERE sha256 = ledger_sha256
UNION ALL SELECT path, changed_at, inode FROM ignored SEMI JOIN touched USING (path);

INSERT INTO changed (path, status) SELECT path, 'new' FROM read_rows WHERE sha256 <> ledger_sha256;

CREATE OR REPLACE TEMP VIEW staged AS
SELECT * EXCLUDE (ledger_sha256, read_failed) FROM read_rows ANTI JOIN failed USING (path)
WHERE ledger_sha256 IS NULL OR sha256 <> ledger_sha256;

CREATE OR REPLACE TABLE affected AS
-- A 64-bit hash in place of sha256: another content with an equal hash is resolved again, with the same outcome.
SELECT DISTINCT hash(sha256) AS key FROM (
    SELECT sha256 FROM staged UNION ALL SELECT sha256 FROM ledger SEMI JOIN changed USING (path)
) WHERE sha256 IS NOT NULL;

-- The images of these files are resolved with their rows of the ledger.
DELETE FROM changed WHERE path IN (SELECT path FROM failed)
"""

READ = "CREATE OR REPLACE TEMP VIEW read AS SELECT *, split AS split_in_part FROM staged"

READ_WITH_KNOWN_SPLITS = """
CREATE OR REPLACE TABLE known_splits AS
-- The table takes precedence; the ledger has the splits of deleted images and of images in conflict. A content that is
-- in neither is usually an edited image: it gets the split of its path, so that the original keeps it when restored.
SELECT sha256, arg_min(split, rank || split) AS split FROM (
    SELECT sha256, split, '0' AS rank FROM existing
    UNION ALL
    SELECT sha256, split, '1' FROM ledger WHERE split IS NOT NULL
    UNION ALL
    SELECT staged.sha256, ledger.split, '2' FROM ledger JOIN staged USING (path)
    WHERE ledger.split IS NOT NULL AND NOT $replaced
) SEMI JOIN affected ON hash(sha256) = key GROUP BY sha256;

CREATE OR REPLACE TEMP VIEW read AS
SELECT s.* REPLACE (CASE WHEN reason IS NULL THEN r.split END AS split), s.split AS split_in_part
FROM staged s LEFT JOIN known_splits r ON s.sha256 = r.sha256
"""

RESOLUTION = f"""
CREATE OR REPLACE TABLE recalled AS
SELECT path, label, split, size, modified_at, changed_at, inode, sha256, reason, detail
FROM unchanged SEMI JOIN affected ON hash(sha256) = key;

CREATE OR REPLACE VIEW candidates AS
SELECT *, NULL AS split_in_part FROM recalled
UNION ALL
SELECT path, label, split, size, modified_at, changed_at, inode, sha256, reason, detail, split_in_part FROM read;

CREATE OR REPLACE TABLE repeated AS
SELECT hash(sha256) AS key FROM candidates WHERE reason IS NULL GROUP BY key HAVING count(*) > 1;

CREATE OR REPLACE TABLE contents AS
-- Only of contents in several files: a group of each content would not fit into memory.
SELECT sha256, min(path) AS first, min(label) <> max(label) AS two_labels, min(split) <> max(split) AS two_splits
FROM candidates SEMI JOIN repeated ON hash(sha256) = key WHERE reason IS NULL GROUP BY sha256;

CREATE OR REPLACE TABLE conflicts AS
-- Lists are built only for the few contents that are in conflict.
SELECT sha256, string_agg(DISTINCT label, ', ' ORDER BY label) AS labels,
    string_agg(DISTINCT split, ', ' ORDER BY split) AS splits
FROM candidates SEMI JOIN (FROM contents WHERE two_labels OR two_splits) USING (sha256)
WHERE reason IS NULL GROUP BY sha256;

CREATE OR REPLACE VIEW resolving AS
SELECT path, label, split, size, modified_at, changed_at, inode, f.sha256,
    CASE WHEN reason = '{Reason.OTHER_FILE.value}' THEN '{IGNORED}'
         WHEN reason IS NOT NULL OR two_labels OR two_splits THEN '{QUARANTINED}'
         WHEN first IS NULL OR path = first THEN '{STORED}'
         ELSE '{DUPLICATE}' END AS outcome,
    CASE WHEN reason IS NOT NULL THEN reason
         WHEN two_labels THEN '{Reason.LABEL_CONFLICT.value}'
         WHEN two_splits THEN '{Reason.SPLIT_CONFLICT.value}' END AS reason,
    CASE WHEN reason IS NOT NULL THEN detail
         WHEN two_labels THEN 'the same content under the labels ' || labels
         WHEN two_splits THEN 'the same content in the splits ' || splits END AS detail,
    split_in_part
FROM candidates f LEFT JOIN contents c ON f.reason IS NULL AND f.sha256 = c.sha256
    LEFT JOIN conflicts x ON c.sha256 = x.sha256;

-- An image of a deleted file is not kept if a file of the source has the same content: that file's label counts.
CREATE OR REPLACE VIEW live AS SELECT sha256 FROM unchanged UNION ALL SELECT sha256 FROM read;

CREATE OR REPLACE TABLE loose AS
FROM existing SEMI JOIN affected ON hash(sha256) = key
UNION ALL FROM orphans ANTI JOIN affected ON hash(sha256) = key;

CREATE OR REPLACE VIEW others AS
SELECT path, label, split, size, modified_at, changed_at, inode, sha256, outcome, reason, detail
FROM unchanged ANTI JOIN affected ON hash(sha256) = key;

CREATE OR REPLACE TABLE drawn AS
-- A table, since the draws take as long as all the rest; the splits that follow from them do not.
SELECT *, CASE WHEN split IS NULL AND reason IS NULL THEN draw_of($seed, sha256) END AS draw FROM resolving
"""  # noqa: S608  # constants of the tables
"""The outcomes of all files with the same contents, without the splits that are assigned now."""

DRAW_OF = "CREATE OR REPLACE MACRO draw_of(seed, sha256) AS ('0x' || sha256(concat(seed, ':', sha256))[1:15])::BIGINT"
"""Place of an image in the order of its class: 60 bits, which no two of ten million images are expected to share."""

HELD = """
CREATE OR REPLACE VIEW held AS
SELECT sha256, label, split FROM others WHERE outcome = 'stored'
UNION ALL SELECT sha256, label, split FROM drawn WHERE outcome = 'stored'
UNION ALL SELECT sha256, label, split FROM kept
"""

RESOLVED = """
CREATE OR REPLACE TABLE bounds AS
WITH ranked AS (
    SELECT label, draw, row_number() OVER (PARTITION BY label ORDER BY draw) - 1 AS rank
    FROM drawn WHERE outcome = 'stored' AND split IS NULL
)
SELECT label, assigned.split, draw AS lower,
    lead(draw, 1, 1::BIGINT << 60) OVER (PARTITION BY label ORDER BY draw) AS upper
FROM ranked JOIN assigned USING (label) WHERE rank = assigned.first;

CREATE OR REPLACE VIEW resolved AS
SELECT r.* EXCLUDE (split_in_part, draw) REPLACE (coalesce(r.split, b.split) AS split),
    coalesce(split_in_part <> coalesce(r.split, b.split), false) AS is_moved
FROM drawn r LEFT JOIN bounds b ON r.label = b.label AND r.draw >= b.lower AND r.draw < b.upper;

CREATE OR REPLACE VIEW outcomes AS FROM others UNION ALL SELECT * EXCLUDE (is_moved) FROM resolved;
CREATE OR REPLACE VIEW stored AS SELECT sha256, label, split FROM outcomes WHERE outcome = 'stored';
CREATE OR REPLACE VIEW resolved_images AS SELECT sha256, label, split FROM resolved WHERE outcome = 'stored'
"""

UNUSABLE = """
SELECT path, label, reason, detail FROM outcomes WHERE outcome = $bad
UNION ALL SELECT path, NULL, $unreadable, detail FROM failed
ORDER BY path
"""

MOVED = """
SELECT sha256 FROM loose ANTI JOIN (FROM resolved_images SEMI JOIN loose USING (sha256)) USING (sha256, label, split)
    SEMI JOIN (FROM stored SEMI JOIN loose USING (sha256)) USING (sha256)
"""
"""sha256 of the rows of `images` whose label or split changes."""

DELETIONS = """
SELECT label, count(*) FROM loose
    ANTI JOIN (FROM stored SEMI JOIN loose USING (sha256)) USING (sha256) ANTI JOIN kept USING (sha256)
GROUP BY label
"""
"""Number of the contents that leave `images`, by label."""

CHANGES = """
WITH differing AS (
    SELECT * EXCLUDE (is_moved) FROM resolved o ANTI JOIN (FROM ledger SEMI JOIN resolved USING (path)) l
        ON o.path = l.path AND o.size = l.size AND o.modified_at = l.modified_at
        AND o.outcome = l.outcome AND o.label IS NOT DISTINCT FROM l.label AND o.split IS NOT DISTINCT FROM l.split
        AND o.sha256 IS NOT DISTINCT FROM l.sha256 AND o.reason IS NOT DISTINCT FROM l.reason
        AND o.detail IS NOT DISTINCT FROM l.detail
    UNION ALL
    SELECT path, label, split, size, modified_at, changed_at, inode, sha256, 'deleted', NULL, NULL
    FROM known SEMI JOIN (FROM changed WHERE status = 'gone') USING (path)
)
SELECT path, label, split, size, modified_at, sha256, outcome, reason, detail, $seen_at::TIMESTAMPTZ AS seen_at,
    coalesce(r.changed_at, o.changed_at) AS changed_at, coalesce(r.inode, o.inode) AS inode
FROM (
    FROM differing
    UNION ALL
    SELECT path, label, split, size, modified_at, changed_at, inode, sha256, outcome, reason, detail
    FROM known SEMI JOIN refreshed USING (path) ANTI JOIN (FROM differing SEMI JOIN refreshed USING (path)) USING (path)
) o LEFT JOIN refreshed r USING (path)
"""
"""Rows to write to the ledger: other outcomes or files, and the new status of files that were only touched."""

FILL = """
CREATE OR REPLACE TABLE fillable AS
-- Whole buckets: a bucket with both kinds of rows is compared row by row.
SELECT bucket FROM (
    SELECT bucket, sum(number) OVER (ORDER BY bucket) AS total FROM (
        SELECT bucket_of(path) AS bucket, count(*) AS number FROM unchanged WHERE inode IS NULL GROUP BY bucket
    )
) WHERE total <= $most;

INSERT INTO refreshed
SELECT path, l.changed_at, l.inode FROM (FROM listing WHERE inode IS NOT NULL) l JOIN (
    FROM (FROM unchanged WHERE inode IS NULL) SEMI JOIN fillable ON bucket_of(path) = bucket
    ANTI JOIN refreshed USING (path)
) k USING (path)
"""

COUNT_CHANGES = f"""
SELECT (SELECT count(*) FROM ({CHANGES})), (SELECT count(*) FROM ledger SEMI JOIN ({CHANGES}) USING (path))
"""  # noqa: S608  # text of this module

CHOICE_OF_PARTS = """
CREATE OR REPLACE TABLE ambiguous_hashes AS
-- An image with another content is in one part alone, and is to be inserted.
SELECT key FROM repeated UNION SELECT hash(sha256) FROM loose;

CREATE OR REPLACE TABLE ambiguous_rows AS
SELECT part, sha256, label, split FROM staged SEMI JOIN ambiguous_hashes ON hash(sha256) = key WHERE part IS NOT NULL;

CREATE OR REPLACE TABLE resolved_rows AS FROM resolved_images SEMI JOIN ambiguous_hashes ON hash(sha256) = key;

CREATE OR REPLACE TABLE rows_to_insert AS
SELECT sha256, min(part) AS part
FROM ambiguous_rows SEMI JOIN (FROM resolved_rows ANTI JOIN loose USING (sha256, label, split)) USING (sha256, label)
GROUP BY sha256;

CREATE OR REPLACE TABLE parts AS
SELECT part, sum(num_rows)::BIGINT AS num_rows FROM (
    SELECT part, count(*) AS num_rows FROM staged ANTI JOIN ambiguous_hashes ON hash(sha256) = key
    WHERE part IS NOT NULL GROUP BY part
    UNION ALL
    SELECT part, count(*) FROM rows_to_insert GROUP BY part
) GROUP BY part;

CREATE OR REPLACE TABLE rows_to_drop AS
SELECT DISTINCT part, sha256
FROM ambiguous_rows SEMI JOIN parts USING (part) ANTI JOIN rows_to_insert USING (part, sha256);

CREATE OR REPLACE TABLE moved_in_parts AS
SELECT sha256, label, split FROM resolved ANTI JOIN ambiguous_hashes ON hash(sha256) = key WHERE is_moved;

CREATE OR REPLACE TABLE reassigned AS
SELECT d.part, d.sha256, o.split
FROM ambiguous_rows d JOIN resolved_rows o ON d.sha256 = o.sha256 AND d.label = o.label WHERE d.split <> o.split
UNION
SELECT s.part, s.sha256, o.split
FROM staged s JOIN moved_in_parts o ON s.sha256 = o.sha256 AND s.label = o.label WHERE s.part IS NOT NULL
"""
"""The parts to commit, and the rows to change in them."""

WHOLE_PARTS = """
SELECT part, num_rows FROM parts
WHERE part NOT IN (SELECT part FROM rows_to_drop UNION ALL SELECT part FROM reassigned) ORDER BY part
"""

EDITS = """
SELECT part, sha256, split FROM (
    SELECT part, sha256, NULL AS split FROM rows_to_drop
    UNION ALL
    SELECT part, sha256, split FROM reassigned ANTI JOIN rows_to_drop USING (part, sha256)
) SEMI JOIN parts USING (part) ORDER BY part, sha256
"""
