"""SQL queries of the parts to commit, and of the rows to change in them.

The right side of a join, of which DuckDB builds a hash table, is usually small, or cut to the rows that matter.

Tables, in the order of their creation, after those of `outcome_queries`:

- doubts: hashes of the contents that may be in several parts, or in the table already.
- doubtful, decided: rows in parts with such a content, and stored images with such a content.
- wanted: of these, images to insert, each with the first part that has it.
- parts: parts with images to insert, and their numbers of rows.
- unwanted: images in these parts that are not to be inserted.
- moved_in_parts, reassigned: images whose assigned split differs from the split in the part, and their parts.
"""

DOUBTS = """
CREATE OR REPLACE TABLE doubts AS
-- An image with another content is in one part alone, and is to be inserted.
SELECT key FROM repeated UNION SELECT hash(sha256) FROM loose
"""

DOUBTFUL = """
CREATE OR REPLACE TABLE doubtful AS
SELECT part, sha256, label, split FROM staged SEMI JOIN doubts ON hash(sha256) = key WHERE part IS NOT NULL
"""

DECIDED = """
CREATE OR REPLACE TABLE decided AS FROM resolved_images SEMI JOIN doubts ON hash(sha256) = key
"""

WANTED = """
CREATE OR REPLACE TABLE wanted AS
SELECT sha256, min(part) AS part
FROM doubtful SEMI JOIN (FROM decided ANTI JOIN loose USING (sha256, label, split)) USING (sha256, label)
GROUP BY sha256
"""

PARTS = """
CREATE OR REPLACE TABLE parts AS
SELECT part, sum(num_rows)::BIGINT AS num_rows FROM (
    SELECT part, count(*) AS num_rows FROM staged ANTI JOIN doubts ON hash(sha256) = key
    WHERE part IS NOT NULL GROUP BY part
    UNION ALL
    SELECT part, count(*) FROM wanted GROUP BY part
) GROUP BY part
"""

UNWANTED = """
CREATE OR REPLACE TABLE unwanted AS
SELECT DISTINCT part, sha256 FROM doubtful SEMI JOIN parts USING (part) ANTI JOIN wanted USING (part, sha256)
"""

MOVED_IN_PARTS = """
CREATE OR REPLACE TABLE moved_in_parts AS
SELECT sha256, label, split FROM resolved ANTI JOIN doubts ON hash(sha256) = key WHERE is_moved
"""

REASSIGNED = """
CREATE OR REPLACE TABLE reassigned AS
SELECT d.part, d.sha256, o.split
FROM doubtful d JOIN decided o ON d.sha256 = o.sha256 AND d.label = o.label WHERE d.split <> o.split
UNION
SELECT s.part, s.sha256, o.split
FROM staged s JOIN moved_in_parts o ON s.sha256 = o.sha256 AND s.label = o.label WHERE s.part IS NOT NULL
"""

CHOICE_OF_PARTS = (DOUBTS, DOUBTFUL, DECIDED, WANTED, PARTS, UNWANTED, MOVED_IN_PARTS, REASSIGNED)
"""Queries to run in this order for the parts to commit, and the rows to change in them."""

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
