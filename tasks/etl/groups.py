"""Groups of images that have one split, such as those of a patient: found in the source and the tables, dealt whole.

They are found anew in each run, from paths, the label file, or perceptual hashes: tables have no column for them. An
image of several groups, as by a copy in another folder, joins them.

Views and tables, after `drawn` of `outcome_queries`:

- held_paths: paths of the images that the table will have.
- links: hash of an image, and name and number of its group; by near-duplicates, the name is a path.
- memberships: hash of an image, and number of the joined groups.
- members: the images of groups; split is null if it is assigned now.
- names: name of a group, and the text that its draw follows from.
- sides: split of a group.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.config.etl import EtlConfig
from tasks.config.patterns import compile_pattern, translate
from tasks.errors import WrongInput, loggable
from tasks.etl.gates import GroupReport
from tasks.etl.near_duplicates import cluster_hashes, components
from tasks.etl.stratify import Counts, Group, SplitRule, deal_groups
from tasks.refs import TEST, VAL
from tasks.schema import IMAGES_ARROW, columns_of
from tasks.storage import Storage
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations
from tasks.text.forms import composed

HASHES_ARROW = columns_of(IMAGES_ARROW, "sha256", "dhash")

GROUP_OF = {
    "pattern": "nullif(regexp_extract(nfc_normalize(file), getvariable('group_pattern'), {group}), '')",
    "column": "(SELECT min(name) FROM group_rows WHERE path = nfc_normalize(file))",
    "near_duplicates": "NULL::VARCHAR",
}
"""Name of the group of a path."""

LINKS = """
CREATE OR REPLACE VIEW held_paths AS
SELECT path, sha256 FROM others WHERE outcome IN ('stored', 'duplicate')
UNION ALL SELECT path, sha256 FROM drawn WHERE outcome IN ('stored', 'duplicate')
UNION ALL SELECT path, sha256 FROM ledger SEMI JOIN kept USING (sha256);

CREATE OR REPLACE TABLE links AS
SELECT hash(sha256) AS image, name, hash(name) AS number FROM (SELECT sha256, group_of(path) AS name FROM held_paths)
WHERE name IS NOT NULL
"""

HASHED = """
CREATE OR REPLACE TABLE hashed AS
SELECT DISTINCT hash(sha256) AS image, dhash FROM (FROM stored_hashes UNION ALL SELECT sha256, dhash FROM staged)
SEMI JOIN held USING (sha256) WHERE dhash IS NOT NULL
"""

LINKS_OF_CLUSTERS = """
INSERT INTO links
WITH clustered AS (SELECT image, number::UBIGINT AS number FROM hashed JOIN clusters USING (dhash))
SELECT image, path, number FROM (SELECT path, hash(sha256) AS image FROM held_paths) JOIN (
    FROM clustered SEMI JOIN (SELECT number FROM clustered GROUP BY number HAVING count(*) > 1) USING (number)
) USING (image)
"""
"""Links of clusters of several images; any other image is a group of its own."""

MEMBERS = """
CREATE OR REPLACE TABLE members AS
SELECT m.number, sha256, label, split FROM held JOIN memberships m ON hash(sha256) = image;

CREATE OR REPLACE TABLE names AS
-- Near-duplicates are drawn by their contents alone.
SELECT number, name, CASE WHEN $by_hash THEN first ELSE name END AS drawn_by
FROM (SELECT m.number, min(name) AS name FROM links JOIN memberships m USING (image) GROUP BY m.number)
    JOIN (SELECT number, min(sha256) AS first FROM members GROUP BY number) USING (number);

CREATE OR REPLACE TABLE sides AS
-- Images of the table take precedence over those that left it, and the split of most images over the others.
SELECT number, arg_min(split, (rank, -images, list_position(['train', 'val', 'test'], split))) AS split FROM (
    SELECT number, split, count(*) AS images, 0 AS rank FROM members WHERE split IS NOT NULL GROUP BY ALL
    UNION ALL
    SELECT number, l.split, count(*), 1 FROM (
        SELECT group_of(path) AS name, split FROM ledger WHERE split IS NOT NULL AND NOT $replaced
    ) l JOIN (SELECT DISTINCT m.number, name FROM links JOIN memberships m USING (image)) USING (name) GROUP BY ALL
) GROUP BY number
"""

ASSIGN = """
UPDATE drawn SET split = s.split FROM memberships m JOIN sides s USING (number)
WHERE m.image = hash(drawn.sha256) AND drawn.split IS NULL AND drawn.reason IS NULL
"""

SPLIT_OF_DRAW = f"""
CASE WHEN {{draw}}::DOUBLE / (1::BIGINT << 60) < $test THEN '{TEST}'
     WHEN {{draw}}::DOUBLE / (1::BIGINT << 60) < $test::DOUBLE + $val::DOUBLE THEN '{VAL}' ELSE 'train' END
"""
"""As `split_of` for one image."""

DRAW_SIDES = f"""
INSERT INTO sides SELECT number, {SPLIT_OF_DRAW.format(draw="draw_of($seed, drawn_by)")}
FROM names ANTI JOIN sides USING (number);
{ASSIGN};
UPDATE drawn SET split = {SPLIT_OF_DRAW.format(draw="draw")} WHERE split IS NULL AND reason IS NULL
"""  # noqa: S608  # text of this module

TO_DEAL = """
SELECT number, any_value(draw_of($seed, drawn_by)), label, count(*)
FROM members ANTI JOIN sides USING (number) JOIN names USING (number)
    SEMI JOIN (SELECT number FROM members GROUP BY number HAVING count(*) > 1) USING (number)
GROUP BY number, label
"""
"""Groups of several images without a split, by label; single images are apportioned afterwards."""

SPANNING = """
WITH spanning AS (
    SELECT number FROM members GROUP BY number HAVING min({column}) <> max({column})
), first AS (
    SELECT number, name FROM names SEMI JOIN spanning USING (number) ORDER BY name LIMIT 1
)
SELECT (SELECT count(*) FROM spanning), name, {column}, count(*) FROM members JOIN first USING (number)
WHERE {column} IS NOT NULL GROUP BY ALL ORDER BY {column}
"""

LARGEST = """
SELECT label, max(images) FROM (SELECT number, label, count(*) AS images FROM members GROUP BY ALL) GROUP BY label
"""

LINKS_ARROW = pa.schema([("image", pa.uint64()), ("number", pa.uint64())])
SIDES_ARROW = pa.schema([("number", pa.int64()), ("split", pa.string())])


def split_counts(relations: Relations) -> tuple[dict[str, Counts], dict[str, int]]:
    """Return the numbers of images by label and split, and by label those of images without a split."""
    existing: dict[str, Counts] = {}
    new: dict[str, int] = {}
    for label, split, number in relations.rows("SELECT label, split, count(*) FROM held GROUP BY ALL"):
        if split is None:
            new[label] = number
        else:
            existing.setdefault(label, {})[split] = number
    return existing, new


def _define_groups(relations: Relations, etl: EtlConfig, rows: pa.Table) -> None:
    """Define the macro `group_of`, the name of the group of a path or null, for settings and rows of GROUPS_ARROW."""
    number = 1
    if etl.split_group.pattern is not None:
        pattern = composed(etl.split_group.pattern)
        number = compile_pattern(pattern).groupindex.get("group", 1)
        relations.run("SET VARIABLE group_pattern = $pattern", {"pattern": translate(pattern)})
    relations.add("group_rows", rows)
    relations.run(f"CREATE OR REPLACE MACRO group_of(file) AS {GROUP_OF[etl.split_group.by].format(group=number)}")


@dataclass(frozen=True)
class Grouping:
    """The groups of the images of a run.

    Attributes:
        etl: Settings.
        rows: Names of groups in the label file (GROUPS_ARROW).
        hashes: Perceptual hashes of the images of the table (HASHES_ARROW), for near-duplicates.
    """

    etl: EtlConfig
    rows: pa.Table
    hashes: pa.Table | ParquetRows

    def assign(self, relations: Relations, rule: SplitRule, *, replaced: bool) -> GroupReport:
        """Assign splits to the images of `drawn` whose groups have a split or several images, and return the groups.

        New images get the split of their group. With `content`, all other images get one, too.
        """
        by_hash = self.etl.split_group.by == "near_duplicates"
        _define_groups(relations, self.etl, self.rows)
        relations.run(LINKS)
        complete = self._link_near_duplicates(relations) if by_hash else True
        links = relations.table("SELECT image, number FROM links", LINKS_ARROW)
        nodes, places = np.unique(np.concatenate([links["image"], links["number"]]), return_inverse=True)
        joined = components(places[: len(links)], places[len(links) :], len(nodes))
        relations.add("memberships", pa.table({"image": nodes, "number": joined}))
        relations.run(MEMBERS, {"by_hash": by_hash, "replaced": replaced})
        relations.run(ASSIGN)
        shares = {split: float(rule.shares[split]) for split in (VAL, TEST)}
        if self.etl.split_by == "content":
            relations.run(DRAW_SIDES, {"seed": rule.seed, **shares})
        else:
            existing, new = split_counts(relations)
            groups: dict[int, Group] = {}
            for number, draw, label, images in relations.rows(TO_DEAL, {"seed": rule.seed}):
                groups.setdefault(number, Group(number, draw, {})).sizes[label] = images
            dealt = deal_groups(existing, new, groups.values(), rule)
            relations.add("dealt", pa.Table.from_arrays([[*dealt], [*dealt.values()]], schema=SIDES_ARROW))
            relations.run(f"INSERT INTO sides FROM dealt; {ASSIGN}")
        ((num_groups, num_images, num_held),) = relations.rows(
            "SELECT count(DISTINCT number), count(*), (SELECT count(*) FROM held) FROM members"
        )
        return GroupReport(
            num_groups=num_groups,
            num_images=num_images,
            num_others=num_held - num_images,
            largest=dict(relations.rows(LARGEST)),
            labels=_spanning(relations, "label"),
            splits=_spanning(relations, "split"),
            complete=complete,
        )

    def _link_near_duplicates(self, relations: Relations) -> bool:
        """Add the links of clusters of several images; return whether all were found."""
        relations.add("stored_hashes", self.hashes)
        relations.run(HASHED)
        hashes = relations.table("SELECT DISTINCT dhash FROM hashed", columns_of(HASHES_ARROW, "dhash"))["dhash"]
        distinct = np.sort(hashes.to_numpy())
        clusters, complete = cluster_hashes(distinct, self.etl.near_duplicate_bits)
        relations.add("clusters", pa.table({"dhash": distinct, "number": clusters}))
        relations.run(LINKS_OF_CLUSTERS)
        return complete


def _spanning(relations: Relations, column: str) -> tuple[int, str]:
    """Return the number of groups with several values of a column, and name and sizes of the first."""
    rows = relations.rows(SPANNING.format(column=column))
    sizes = ", ".join(f"{value} {images}" for _, _, value, images in rows)
    return (rows[0][0], loggable(f"'{rows[0][1]}' ({sizes})")) if rows else (0, "")


def check_groups(listing: ParquetRows, rows: pa.Table, source: str, etl: EtlConfig, storage: Storage) -> None:
    """Check that the pattern or the column names the group of any file.

    Raises:
        WrongInput: It names none.
    """
    by = etl.split_group.by
    if by not in {"pattern", "column"}:
        return
    with Relations(storage) as relations:
        _define_groups(relations, etl, rows)
        relations.add("listing", listing)
        ((found, example),) = relations.rows("SELECT count(group_of(path)), min(path) FROM listing")
    if not found:
        value = getattr(etl.split_group, by)
        raise WrongInput(
            f"etl.split_group.{by} is '{loggable(value)}', which names no group in '{source}', e.g. of '{example}'",
            setting=f"etl.split_group.{by}",
            way_out="correct it, or leave out etl.split_group",
        )


def groups_by_class(listing: ParquetRows, rows: pa.Table, etl: EtlConfig, storage: Storage) -> Counter[str]:
    """Return the number of groups by label, from paths alone; a file without a group is one of its own."""
    query = """
        SELECT nfc_normalize(label), count(DISTINCT hash(coalesce(group_of(path), path))) FROM listing
        WHERE label IS NOT NULL GROUP BY ALL
    """
    with Relations(storage) as relations:
        _define_groups(relations, etl, rows)
        relations.add("listing", listing)
        return Counter(dict(relations.rows(query)))
