"""ETL runs with test settings, and the contents of their tables."""

from pathlib import Path

from pyspark.sql import SparkSession

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_images
from tasks.refs import EtlReport
from tasks.storage import Storage
from tasks.tables import snapshots
from tests.builders.delta_rows import newest_rows

SETTINGS = {"val_fraction": 0.2, "test_fraction": 0.2}


def etl_settings(source: Path, **settings) -> EtlConfig:
    """Return the ETL settings of the tests, with some replaced."""
    return EtlConfig(**({"source": str(source)} | SETTINGS | settings))


def ingest(source: Path, storage: Storage, **settings) -> EtlReport:
    """Run ETL with the tests' settings."""
    return ingest_images(etl_settings(source, **settings), storage, SparkConfig())


def ledger(spark: SparkSession, storage: Storage) -> dict[str, tuple[str, str | None]]:
    """Return outcome and reason by path."""
    rows = newest_rows(spark, storage.table("files"), "path", "outcome", "reason")
    return {row["path"]: (row["outcome"], row["reason"]) for row in rows}


def stored(spark: SparkSession, storage: Storage) -> dict[str, str]:
    """Return label by sha256 of the table images."""
    rows = newest_rows(spark, storage.table("images"), "sha256", "label")
    return {row["sha256"]: row["label"] for row in rows}


def versions(spark: SparkSession, storage: Storage) -> tuple[int, int]:
    """Return the newest versions of images and files."""
    return tuple(snapshots.latest(spark, storage.table(name)).version for name in ("images", "files"))
