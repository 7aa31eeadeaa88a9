"""SQL queries of the comparison of a source with the tables.

The right side of a join, of which DuckDB builds a hash table, is usually small, or cut to the rows that matter.

Views and tables, in the order of their creation:

- images_listed, ignored, ledger, existing: the images and other files of the source, and the rows of the tables `files`
  and `images`.
- images_now, listing: the images with the labels of the table, and all files of the source.
- known: rows of the ledger whose file was in the source at the last run.
- differing: buckets of paths, by their hash, that have other files or other values in the source than in `known`.
- changed: paths with a status, new, again (unchanged, but read again) or gone. The others are unchanged.
- touched: unchanged paths with another inode or time of status change, which are read: changed if the content is.
- unsettled: buckets of contents, by their hash, that have other rows in `images` than stored files in `known`.
- orphans: rows of `images` without an unchanged stored file.
- absent, kept: images of deleted files, and those of them that stay in the table.
"""

BUCKET_OF = "CREATE OR REPLACE MACRO bucket_of(text) AS hash(text) >> 44"
"""One of 2^20 buckets: at ten million files ten in each, and few enough for memory."""

LISTING = """
CREATE OR REPLACE TEMP VIEW images_now AS FROM images_listed;

CREATE OR REPLACE TEMP VIEW listing AS
FROM images_now UNION ALL SELECT path, NULL, NULL, size, modified_at, changed_at, inode FROM ignored
"""
"""Files that are ignored have neither a label nor a split."""

KNOWN = "CREATE OR REPLACE VIEW known AS FROM ledger WHERE outcome <> 'deleted'"

SUMS = """
    SELECT bucket_of(path) AS bucket, count(*) AS number, sum(hash(path, label, {split}, size, modified_at)) AS total,
        count(inode) AS with_inode, sum(hash(path, changed_at, inode)) FILTER (inode IS NOT NULL) AS total_status
"""

DIFFERING = f"""
CREATE OR REPLACE TABLE differing AS
-- By number of files and sum of 64-bit hashes of their values: a join of ten million paths would not fit into memory.
-- A changed file is missed with a probability of 2^-64.
WITH listed AS ({SUMS} FROM listing GROUP BY bucket), recorded AS ({SUMS} FROM known GROUP BY bucket)
SELECT bucket FROM listed FULL OUTER JOIN recorded USING (bucket)
WHERE listed.number IS DISTINCT FROM recorded.number OR listed.total IS DISTINCT FROM recorded.total
    -- Not where all rows are of a release without inodes, or all files on a store: they count as unchanged.
    OR (listed.with_inode > 0 AND recorded.with_inode > 0 AND listed.total_status <> recorded.total_status)
UNION SELECT bucket_of(path) FROM known WHERE reason IN $read_again
"""  # noqa: S608  # text of this module

CHANGED = """
CREATE OR REPLACE TABLE changed AS
SELECT coalesce(l.path, k.path) AS path,
    coalesce(
        NOT $replaced AND l.size = k.size AND l.modified_at = k.modified_at AND l.label IS NOT DISTINCT FROM k.label
        -- If the split follows from the content, the listing has none and the ledger's is valid.
        AND coalesce(l.split, k.split) IS NOT DISTINCT FROM k.split, false) AS is_same,
    -- A value that one side lacks is no difference.
    is_same AND coalesce(l.inode <> k.inode OR l.changed_at <> k.changed_at, false) AS is_touched,
    CASE WHEN l.path IS NULL THEN 'gone' WHEN NOT is_same THEN 'new' WHEN k.read_again THEN 'again' ELSE 'touched'
        END AS status
FROM (FROM listing {chosen}) l FULL OUTER JOIN (
    SELECT path, label, split, size, modified_at, changed_at, inode,
        coalesce(reason IN $read_again, false) AS read_again
    FROM known {chosen}
) k ON l.path = k.path
WHERE NOT is_same OR k.read_again OR is_touched;

CREATE OR REPLACE TABLE all_touched AS SELECT path FROM changed WHERE status = 'touched';
DELETE FROM changed WHERE status = 'touched';
-- Without a file whose image is lost: it is new.
CREATE OR REPLACE VIEW touched AS FROM all_touched ANTI JOIN changed USING (path);

CREATE OR REPLACE TABLE unsettled AS
-- As `differing`, by a hash of the content.
WITH present AS (
    SELECT bucket_of(sha256) AS bucket, count(*) AS number, sum(hash(sha256, label, split)) AS total
    FROM existing GROUP BY bucket
),
recorded AS (
    SELECT bucket_of(sha256) AS bucket, count(*) AS number, sum(hash(sha256, label, split)) AS total
    FROM known WHERE outcome = 'stored' GROUP BY bucket
)
SELECT bucket FROM present FULL OUTER JOIN recorded USING (bucket)
WHERE present.number IS DISTINCT FROM recorded.number OR present.total IS DISTINCT FROM recorded.total
UNION SELECT bucket_of(sha256) FROM known SEMI JOIN changed USING (path) WHERE outcome = 'stored';

-- Where an image is lost, its duplicates, too: the stored file may be gone, and one of them takes its place.
INSERT INTO changed (path, status) SELECT path, 'new' FROM (
    FROM known SEMI JOIN unsettled ON bucket_of(sha256) = bucket WHERE outcome IN ('stored', 'duplicate')
)
ANTI JOIN (FROM existing SEMI JOIN unsettled ON bucket_of(sha256) = bucket) USING (sha256, label, split)
ANTI JOIN changed USING (path);

CREATE OR REPLACE VIEW unchanged AS FROM known ANTI JOIN changed USING (path);

CREATE OR REPLACE TABLE orphans AS
FROM existing SEMI JOIN unsettled ON bucket_of(sha256) = bucket ANTI JOIN (
    FROM unchanged SEMI JOIN unsettled ON bucket_of(sha256) = bucket WHERE outcome = 'stored'
) USING (sha256, label, split);

CREATE OR REPLACE TABLE absent AS
SELECT sha256, label, split FROM (
    FROM known SEMI JOIN (FROM changed WHERE status = 'gone') USING (path)
    UNION ALL
    FROM ledger ANTI JOIN changed USING (path) WHERE outcome = 'deleted'
) WHERE $keep;

CREATE OR REPLACE VIEW live AS SELECT sha256 FROM unchanged
"""

NOW_IGNORED = """
-- The content has changed with its kind, although size and time are the same.
INSERT INTO changed (path, status) SELECT path, 'new' FROM (FROM known SEMI JOIN touched USING (path))
    LEFT JOIN (SELECT path, true AS is_ignored FROM ignored SEMI JOIN touched USING (path)) USING (path)
    WHERE (outcome = 'ignored') <> coalesce(is_ignored, false)
"""

IN_DIFFERING = "SEMI JOIN differing ON bucket_of(path) = bucket"

KEPT = """
CREATE OR REPLACE TABLE kept AS
FROM existing SEMI JOIN (FROM absent ANTI JOIN (FROM live SEMI JOIN absent USING (sha256)) USING (sha256))
    USING (sha256, label, split)
"""
