"""Data validation: measurement of one version of the tables, once, before training."""

import logging
from collections import Counter
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator
from pyspark.sql import SparkSession

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.gates import NUM_LISTED
from tasks.etl.near_duplicates import NearDuplicates, find_near_duplicates
from tasks.refs import SPLITS, TEST, TRAIN, VAL, EtlReport, Ref, TableRef
from tasks.schema import DELETED, FILES_ARROW, IGNORED, IMAGES_ARROW, QUARANTINED
from tasks.spark.scratch import scratch_root
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.properties import OTHER_TABLES
from tasks.tables.relations import Relations
from tasks.text.markup import printable
from tasks.tracking.runs import find_data_checks, log_data_checks

logger = logging.getLogger("lakevision.etl")


Printable = Annotated[str, AfterValidator(printable)]
"""A name as tables, logs and artifacts show it to a user."""


class NearPair(Ref):
    """Two similar images in different splits; paths are relative to the source."""

    bits: int
    """Hamming distance of their 64-bit hashes."""
    path: Printable
    label: Printable
    split: str
    other_path: Printable
    other_label: Printable
    other_split: str


class BadFile(Ref):
    """A quarantined file; the path is relative to the source."""

    path: Printable
    reason: str
    detail: Printable | None


class DataChecks(Ref):
    """Results of data validation for one version of the tables; sizes are those of the original images in pixels."""

    images: TableRef
    files: TableRef
    classes: dict[str, dict[str, int]]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    widths: dict[str, int]
    heights: dict[str, int]
    leaked: int
    """Number of distinct contents that are in more than one split."""
    near_duplicates: int
    """Number of pairs of similar images in different splits."""
    near_duplicates_complete: bool
    near_duplicate_bits: int
    nearest: list[NearPair]
    quarantined: list[BadFile]
    """The first NUM_LISTED quarantined files, ordered by path."""

    @property
    def class_sizes(self) -> dict[str, int]:
        """Number of images by label, over all splits."""
        return {label: sum(counts.values()) for label, counts in self.classes.items()}

    @property
    def imbalance_ratio(self) -> float:
        """Size of the largest class divided by the size of the smallest."""
        sizes = self.class_sizes.values()
        return max(sizes) / min(sizes) if sizes else 1.0

    @property
    def quarantined_fraction(self) -> float:
        """Fraction of the source's files that are quarantined."""
        total = sum(self.outcomes.values())
        return sum(self.reasons.values()) / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, as they are logged to the tracking server."""
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
        """Return one row per check for display: its name, value and detail."""
        sizes = self.class_sizes
        smallest, largest = (choose(sizes, key=lambda label: sizes[label], default="") for choose in (min, max))
        extremes = f"smallest {smallest} {sizes.get(smallest, 0)}, largest {largest} {sizes.get(largest, 0)}"
        found = f"{'' if self.near_duplicates_complete else 'at least '}{self.near_duplicates}"
        close = f"pairs in different splits, at most {self.near_duplicate_bits} of 64 bits apart"
        by_split = {split: sum(counts.get(split, 0) for counts in self.classes.values()) for split in SPLITS}
        facts = [
            ("images", sum(sizes.values()), _listed(by_split)),
            ("classes", len(sizes), extremes),
            ("imbalance ratio", f"{self.imbalance_ratio:.2f}", "largest class / smallest class"),
            ("width in pixels", self.widths.get("median", 0), _listed(self.widths)),
            ("height in pixels", self.heights.get("median", 0), _listed(self.heights)),
            ("quarantined", f"{self.quarantined_fraction:.2%}", _listed(self.reasons) or "none"),
            ("duplicates", self.outcomes.get("duplicate", 0), "files with the same content as another file"),
            ("leaked", self.leaked, "contents in more than one split"),
            ("near-duplicates", found, close),
        ]
        return [{"check": name, "value": str(value), "detail": detail} for name, value, detail in facts]


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}

MEASURED_ARROW = pa.schema([field for field in IMAGES_ARROW if field.name not in {"content", "ingested_at"}])

HASHES_ARROW = pa.schema([("dhash", pa.int64()), *((split, pa.int32()) for split in SPLITS)])

COUNT_HASHES = """
SELECT dhash, count(*) FILTER (split = $train) AS train, count(*) FILTER (split = $val) AS val,
    count(*) FILTER (split = $test) AS test
FROM images WHERE dhash IS NOT NULL GROUP BY dhash
"""

FIRST_OF_EACH = """
WITH first AS (
    SELECT dhash, split, label, sha256 FROM images WHERE dhash IN $hashes
    QUALIFY row_number() OVER (PARTITION BY dhash, split ORDER BY sha256) = 1
)
SELECT dhash, split, label, coalesce(path, sha256) FROM first LEFT JOIN (
    SELECT sha256, min(path) AS path FROM files SEMI JOIN first USING (sha256) GROUP BY sha256
) USING (sha256)
ORDER BY split
"""

SUSPECTS = """
CREATE OR REPLACE TABLE suspects AS
SELECT hash(sha256) AS key FROM images GROUP BY key HAVING min(hash(split)) <> max(hash(split))
"""
"""Hashes of contents that may be in two splits: groups of ten million values of sha256 would not fit into memory."""

COUNT_LEAKED = """
SELECT count(*) FROM (
    SELECT sha256 FROM images SEMI JOIN suspects ON hash(sha256) = key GROUP BY sha256 HAVING min(split) <> max(split)
)
"""


def measure_tables(spark: SparkSession | None, report: EtlReport, etl: EtlConfig, storage: Storage) -> DataChecks:
    """Measure the table versions of a report; the image contents are not read.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
        WrongInput: A content is in more than one split, which the ETL never writes.
    """
    with Relations(storage) as tables:
        for name, table, schema in (("images", report.images, MEASURED_ARROW), ("files", report.files, FILES_ARROW)):
            tables.add(name, snapshots.version_rows(spark, table, schema, scratch_root(storage)))
        _check_leakage(tables, report)
        found = tables.rows(
            "SELECT outcome, reason, count(*) FROM files WHERE outcome NOT IN ($deleted, $ignored) GROUP BY ALL",
            {"deleted": DELETED, "ignored": IGNORED},
        )
        outcomes = Counter[str]()
        for outcome, _reason, count in found:
            outcomes[outcome] += count
        bad = tables.rows(
            "SELECT path, reason, detail FROM files WHERE outcome = $bad ORDER BY path LIMIT $limit",
            {"bad": QUARANTINED, "limit": NUM_LISTED},
        )
        shares = {"shares": list(QUANTILES.values())}
        (sides,) = tables.rows(
            "SELECT quantile_disc(width, $shares), quantile_disc(height, $shares) FROM images", shares
        )
        widths, heights = (dict(zip(QUANTILES, side or [], strict=False)) for side in sides)
        near = find_near_duplicates(*_count_hashes(tables), etl.near_duplicate_bits, NUM_LISTED)
        return DataChecks(
            images=report.images,
            files=report.files,
            classes=report.classes,
            outcomes=dict(outcomes),
            reasons={reason: count for _, reason, count in sorted(found, key=lambda row: row[1] or "") if reason},
            widths=widths,
            heights=heights,
            leaked=0,
            near_duplicates=near.num_pairs,
            near_duplicates_complete=near.complete,
            near_duplicate_bits=etl.near_duplicate_bits,
            nearest=_name_pairs(tables, near),
            quarantined=[BadFile(path=path, reason=reason, detail=detail) for path, reason, detail in bad],
        )


def _check_leakage(tables: Relations, report: EtlReport) -> None:
    tables.run(SUSPECTS)
    ((leaked,),) = tables.rows(COUNT_LEAKED)
    if leaked:
        raise WrongInput(
            f"{leaked} images of '{report.images.path}' version {report.images.version} are in more than one split, "
            "so accuracies on them are unreliable",
            setting="storage.tables",
            way_out="a program other than the ETL wrote this table; restore an earlier version, or ingest again into "
            f"{OTHER_TABLES}",
        )


def _count_hashes(tables: Relations) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the distinct hashes, and their numbers of images per split: 20 bytes per image."""
    hashes = [np.zeros(0, np.int64)]
    counts = [np.zeros((0, len(SPLITS)), np.int32)]
    for batch in tables.batches(COUNT_HASHES, HASHES_ARROW, {"train": TRAIN, "val": VAL, "test": TEST}):
        hashes.append(batch["dhash"].to_numpy().copy())  # otherwise the whole batch would stay in memory
        counts.append(np.stack([batch[split].to_numpy() for split in SPLITS], axis=1))
    all_hashes = np.concatenate(hashes)
    hashes.clear()
    return all_hashes, np.concatenate(counts)


def _name_pairs(tables: Relations, near: NearDuplicates) -> list[NearPair]:
    """Return one pair of images for each listed pair of hashes: the first by sha256 in two different splits."""
    hashes = sorted({value for _, *pair in near.closest for value in pair})
    by_hash: dict[int, list[dict[str, str]]] = {}
    for value, split, label, path in tables.rows(FIRST_OF_EACH, {"hashes": hashes}) if hashes else []:
        by_hash.setdefault(value, []).append({"path": path, "label": label, "split": split})
    pairs = []
    for bits, first, second in near.closest:
        one, other = next((a, b) for a in by_hash[first] for b in by_hash[second] if a["split"] != b["split"])
        others = {f"other_{name}": value for name, value in other.items()}
        pairs.append(NearPair.model_validate({"bits": bits, **one, **others}))
    return pairs


def validate_tables(
    report: EtlReport, etl: EtlConfig, storage: Storage, config: SparkConfig, tags: dict[str, str]
) -> DataChecks:
    """Measure the table versions of a report and log the results to MLflow, or return the results logged before.

    Raises:
        WrongInput: As `measure_tables`.
        DiskFull: The disk has no space for what does not fit into memory.
    """
    versions = [f"{table.table_id}@{table.version}" for table in (report.images, report.files)]
    key = "data-validation-2:" + ":".join([*versions, str(etl.near_duplicate_bits)])
    logged = find_data_checks(storage, key)
    if logged is not None:
        return DataChecks.model_validate(logged)
    with translate_disk_full(storage.home):
        checks = try_without_spark(lambda spark: measure_tables(spark, report, etl, storage), config, storage)
    columns = {
        "checks": checks.rows(),
        "near_duplicates": [pair.model_dump() for pair in checks.nearest],
        "quarantined": [file.model_dump() for file in checks.quarantined],
    }
    table_tags = {"lakevision.table": report.images.path, "lakevision.table_version": str(report.images.version)}
    name = f"data-validation v{report.images.version}"
    log_data_checks(storage, name, key, checks.model_dump(), columns, checks.metrics(), tags | table_tags)
    logger.info("data validation: %s", "; ".join(f"{row['check']} {row['value']}" for row in checks.rows()))
    if checks.quarantined:
        named = "; ".join(f"{file.path} ({file.reason})" for file in checks.quarantined)
        more = sum(checks.reasons.values()) - len(checks.quarantined)
        logger.info("quarantined: %s%s", named, f"; and {more} more in {report.files.path}" if more else "")
    return checks
