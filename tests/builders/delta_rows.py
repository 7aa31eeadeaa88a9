"""Rows of Delta tables, read without Spark and without this project's code."""

import os

import deltalake
import pyarrow as pa
import pyarrow.dataset
from pyarrow.fs import S3FileSystem


def delta_rows(table: deltalake.DeltaTable, *columns: str) -> pa.Table:
    """Return these columns of a table, by default all; delta-rs itself needs PyArrow 15 for a partitioned one."""
    files, filesystem = table.file_uris(), None
    if files[0].startswith("s3://"):
        address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        filesystem = S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1")
        files = [file.removeprefix("s3://") for file in files]
    rows = pyarrow.dataset.dataset(files, partitioning="hive", filesystem=filesystem)
    return rows.to_table(columns=list(columns) or None)
