"""The driver's part of a first ETL run, on generated rows of files that were read."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.config.etl import EtlConfig
from tasks.etl.gates import FileCounts, check_bad_fraction, check_class_sizes
from tasks.etl.outcomes import Comparison
from tasks.etl.stratify import SplitRule
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, READ_ARROW
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations
from tests.benchmarks.scale_data import MODIFIED, storage_below

ETL = EtlConfig()

BATCH_ROWS = 100_000

ROWS = """
WITH contents AS (
    SELECT i, CASE WHEN i % 100 = 50 THEN (i * 7919 + 1) % $count WHEN i % 10_000 = 51 THEN i + 7 ELSE i END AS number,
        CASE WHEN i % 10_000 = 51 THEN i ELSE number END % 100 AS class
    FROM range($count) s(i)
),
hashed AS (SELECT *, sha256(number::VARCHAR) AS sha256, sha256(concat($seed, ':', sha256)) AS draw FROM contents)
SELECT printf('class-%03d/%08d.jpg', class, i) AS path, printf('class-%03d', class) AS label,
    CASE WHEN draw < $first_val THEN 'test' WHEN draw < $first_train THEN 'val' ELSE 'train' END AS split,
    3 AS size, $modified::TIMESTAMPTZ AS modified_at, $modified::TIMESTAMPTZ AS changed_at, i AS inode,
    NULL AS ledger_sha256, sha256,
    printf('part-%05d-0123456789abcdef0123456789abcdef-0123456789ab.parquet', i // 1024) AS part,
    NULL AS reason, NULL AS detail, NULL AS read_failed, NULL AS dhash
FROM hashed
"""
"""One per cent are copies of images in other parts, and one of ten thousand has the content of another class."""

LISTING = "SELECT path, label, NULL AS split, size, modified_at, changed_at, inode FROM read"


def write_rows(folder: Path, count: int) -> None:
    """Write the listing of so many files, and the rows of a run that read them."""
    edges = (ETL.test_fraction, ETL.test_fraction + ETL.val_fraction)
    first_val, first_train = (f"{round(edge * 16**8):08x}" for edge in edges)
    values = {"count": count, "seed": ETL.split_seed, "modified": MODIFIED}
    values |= {"first_val": first_val, "first_train": first_train}
    with duckdb.connect(config={"memory_limit": "200MB", "threads": 1}) as database:
        database.execute("SET TimeZone = 'UTC'")
        for name, query, schema in (("listing", LISTING, LISTING_ARROW), ("read", "FROM read", READ_ARROW)):
            rows = database.sql(f"WITH read AS ({ROWS}) {query}", params=values).to_arrow_reader(BATCH_ROWS)
            with pq.ParquetWriter(folder / f"{name}.parquet", schema, compression="zstd") as writer:
                for batch in rows:
                    writer.write_table(pa.Table.from_batches([batch]).cast(schema))


def first_run(folder: Path) -> int:
    """Compare, resolve, check the gates, choose parts, and consume the changes of the ledger; return their number."""
    listing, read = (
        ParquetRows((str(folder / f"{name}.parquet"),), schema)
        for name, schema in (("listing", LISTING_ARROW), ("read", READ_ARROW))
    )
    with Relations(storage_below(folder)) as relations:
        compared = Comparison(
            relations,
            listing,
            FILES_ARROW.empty_table(),
            IMAGE_KEYS_ARROW.empty_table(),
            replaced=False,
            keep_deleted=False,
            rule=SplitRule.of(ETL),
        )
        compared.resolve(read)
        counts = FileCounts.of_groups(compared.groups(), compared.kept_groups())
        check_bad_fraction(counts, ETL)
        check_class_sizes(counts, ETL)
        whole, edits = compared.edits()
        rewritten = sum(batch.num_rows for batch in edits)
        assert len(whole) + rewritten > 0
        compared.parts_with_moved()
        assert compared.surplus().num_rows == 0
        return sum(batch.num_rows for batch in compared.ledger_changes(MODIFIED).batches())
