"""Data validation: what a version of the tables holds, measured once before training sees it."""

import logging
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks import tracking
from tasks.config import EtlConfig
from tasks.errors import WrongInput
from tasks.etl import delta
from tasks.etl.near_duplicates import NearDuplicates, find_near_duplicates
from tasks.refs import EtlReport, TableRef
from tasks.schema import DELETED, QUARANTINED, SPLITS
from tasks.storage import Storage

logger = logging.getLogger("lakevision.etl")

QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}

NUM_LISTED = 20
"""Near-duplicates and quarantined files that are listed; all of them are counted."""


class NearPair(BaseModel):
    """Two pictures in different splits that look alike; paths are relative to the source."""

    model_config = ConfigDict(frozen=True)

    bits: int
    """In how many of 64 bits their hashes differ."""
    path: str
    label: str
    split: str
    other_path: str
    other_label: str
    other_split: str


class BadFile(BaseModel):
    """A quarantined file; the path is relative to the source."""

    model_config = ConfigDict(frozen=True)

    path: str
    reason: str
    detail: str | None


class DataChecks(BaseModel):
    """What one version of the tables holds. Sizes are in pixels, of the original pictures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: TableRef
    files: TableRef
    classes: dict[str, dict[str, int]]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    widths: dict[str, int]
    heights: dict[str, int]
    leaked: int
    """Contents in more than one split."""
    near_duplicates: int
    """Pairs of pictures in different splits that look alike."""
    near_duplicates_complete: bool
    near_duplicate_bits: int
    nearest: list[NearPair]
    quarantined: list[BadFile]
    """The first by path, NUM_LISTED at most."""

    @property
    def class_sizes(self) -> dict[str, int]:
        """Pictures by label, over all splits."""
        return {label: sum(counts.values()) for label, counts in self.classes.items()}

    @property
    def imbalance_ratio(self) -> float:
        """The largest class as a multiple of the smallest."""
        sizes = self.class_sizes.values()
        return max(sizes) / min(sizes) if sizes else 1.0

    @property
    def quarantined_fraction(self) -> float:
        """Share of the files that are there."""
        total = sum(self.outcomes.values())
        return sum(self.reasons.values()) / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, for a tracking server."""
        return {
            "images": sum(self.class_sizes.values()),
            "classes": len(self.classes),
            "imbalance_ratio": self.imbalance_ratio,
            "quarantined_fraction": self.quarantined_fraction,
            "duplicates": self.outcomes.get("duplicate", 0),
            "leaked": self.leaked,
            "near_duplicates": self.near_duplicates,
        }

    def rows(self) -> list[dict[str, str]]:
        """Return the checks for a person, a row each."""
        sizes = self.class_sizes
        smallest, largest = (choose(sizes, key=lambda label: sizes[label], default="") for choose in (min, max))
        by_split = {split: sum(counts.get(split, 0) for counts in self.classes.values()) for split in SPLITS}
        facts = [
            ("pictures", sum(sizes.values()), _listed(by_split)),
            (
                "classes",
                len(sizes),
                f"smallest {smallest} {sizes.get(smallest, 0)}, largest {largest} {sizes.get(largest, 0)}",
            ),
            ("imbalance ratio", f"{self.imbalance_ratio:.2f}", "largest class / smallest class"),
            ("width in pixels", self.widths.get("median", 0), _listed(self.widths)),
            ("height in pixels", self.heights.get("median", 0), _listed(self.heights)),
            ("quarantined", f"{self.quarantined_fraction:.2%}", _listed(self.reasons) or "none"),
            ("duplicates", self.outcomes.get("duplicate", 0), "files with the content of another one"),
            ("leaked", self.leaked, "contents in more than one split"),
            (
                "near-duplicates",
                f"{'' if self.near_duplicates_complete else 'at least '}{self.near_duplicates}",
                f"pairs in different splits, at most {self.near_duplicate_bits} of 64 bits apart",
            ),
        ]
        return [{"check": name, "value": str(value), "detail": detail} for name, value, detail in facts]


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def measure_tables(spark: SparkSession, report: EtlReport, etl: EtlConfig) -> DataChecks:
    """Measure exactly the versions of a report; only columns without pixels are read.

    Raises:
        WrongInput: A content is in more than one split, which no run of the ETL writes.
    """
    images, files = delta.read_version(spark, report.images), delta.read_version(spark, report.files)
    leaked = images.groupBy("sha256").agg(F.count_distinct("split").alias("splits")).where("splits > 1").count()
    if leaked:
        raise WrongInput(
            f"{leaked} pictures of '{report.images.path}' version {report.images.version} are in more than one split, "
            "so no accuracy on them can be believed: something else than the ETL wrote this table; restore an earlier "
            "version, or give other tables (storage.tables or LAKEVISION_HOME)"
        )
    shares = list(QUANTILES.values())
    sizes = images.agg(*(F.percentile_approx(side, shares).alias(side) for side in ("width", "height"))).collect()[0]
    there = files.where(F.col("outcome") != DELETED).groupBy("outcome", "reason").count().collect()
    outcomes: dict[str, int] = {}
    for row in there:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + row["count"]
    bad = files.where(F.col("outcome") == QUARANTINED).orderBy("path").limit(NUM_LISTED)
    near = _find_near(images, etl.near_duplicate_bits)
    return DataChecks(
        images=report.images,
        files=report.files,
        classes=report.classes,
        outcomes=outcomes,
        reasons={
            row["reason"]: row["count"]
            for row in sorted(there, key=lambda found: found["reason"] or "")
            if row["reason"]
        },
        widths=dict(zip(QUANTILES, sizes["width"] or [], strict=False)),
        heights=dict(zip(QUANTILES, sizes["height"] or [], strict=False)),
        leaked=leaked,
        near_duplicates=near.num_pairs,
        near_duplicates_complete=near.complete,
        near_duplicate_bits=etl.near_duplicate_bits,
        nearest=_name_pairs(near, images, files),
        quarantined=[BadFile.model_validate(row.asDict()) for row in bad.select("path", "reason", "detail").collect()],
    )


def _find_near(images: DataFrame, max_bits: int) -> NearDuplicates:
    # Distinct hashes and their counts fit the driver: 32 bytes a picture, where a join of all with all fits nowhere.
    table = images.where("dhash IS NOT NULL").groupBy("dhash").pivot("split", list(SPLITS)).count().toArrow()
    columns = [table[split].fill_null(0).to_numpy() for split in SPLITS]
    counts = np.stack(columns, axis=1) if table.num_rows else np.zeros((0, len(SPLITS)), dtype=np.int64)
    return find_near_duplicates(table["dhash"].to_numpy(), counts, max_bits, NUM_LISTED)


def _name_pairs(near: NearDuplicates, images: DataFrame, files: DataFrame) -> list[NearPair]:
    """Name one picture a side for each listed pair of hashes: the first by sha256 of two splits that differ."""
    hashes = sorted({value for pair in near.closest for value in pair})
    if not hashes:
        return []
    found = images.where(F.col("dhash").isin(hashes)).groupBy("dhash", "split")
    pictures = found.agg(F.min_by(F.struct("sha256", "label"), "sha256").alias("first")).select(
        "dhash", "split", "first.*"
    )
    paths = files.groupBy("sha256").agg(F.min("path").alias("path"))
    by_hash: dict[int, list[Any]] = {}
    for row in pictures.join(paths, on="sha256", how="left").orderBy("split").collect():
        by_hash.setdefault(row["dhash"], []).append(row)
    pairs = []
    for (first, second), bits in zip(near.closest, near.bits, strict=True):
        one, other = next((a, b) for a in by_hash[first] for b in by_hash[second] if a["split"] != b["split"])
        pairs.append(
            NearPair(
                bits=bits,
                path=one["path"] or one["sha256"],
                label=one["label"],
                split=one["split"],
                other_path=other["path"] or other["sha256"],
                other_label=other["label"],
                other_split=other["split"],
            )
        )
    return pairs


def validate_tables(
    spark: SparkSession, report: EtlReport, etl: EtlConfig, storage: Storage, tags: dict[str, str]
) -> DataChecks:
    """Measure the versions of a report and log them to MLflow; versions that were measured before are looked up there.

    Raises:
        WrongInput: As `measure_tables`.
    """
    versions = [f"{table.table_id}@{table.version}" for table in (report.images, report.files)]
    key = "data-validation-2:" + ":".join([*versions, str(etl.near_duplicate_bits)])
    logged = tracking.find_data_checks(storage, key)
    if logged is not None:
        return DataChecks.model_validate(logged)
    checks = measure_tables(spark, report, etl)
    columns = {
        "checks": checks.rows(),
        "near_duplicates": [pair.model_dump() for pair in checks.nearest],
        "quarantined": [file.model_dump() for file in checks.quarantined],
    }
    table_tags = {"lakevision.table": report.images.path, "lakevision.table_version": str(report.images.version)}
    tracking.log_data_checks(storage, key, checks.model_dump(), columns, checks.metrics(), tags | table_tags)
    logger.info("data validation: %s", "; ".join(f"{row['check']} {row['value']}" for row in checks.rows()))
    if checks.quarantined:
        named = "; ".join(f"{file.path} ({file.reason})" for file in checks.quarantined)
        more = sum(checks.reasons.values()) - len(checks.quarantined)
        logger.info("quarantined: %s%s", named, f"; and {more} more in {report.files.path}" if more else "")
    return checks
