"""Tables of one source as rows, with an ETL that neither reads nor decodes files."""

import hashlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from tasks.config.etl import EtlConfig
from tasks.config.storage import StorageConfig
from tasks.etl.extract import split_of
from tasks.etl.gates import GroupReport
from tasks.etl.groups import HASHES_ARROW, Grouping
from tasks.etl.outcomes import Comparison
from tasks.etl.stratify import ORDER, SplitRule
from tasks.refs import TRAIN
from tasks.schema import FILES_ARROW, GROUPS_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, READ_ARROW
from tasks.storage import resolve_storage
from tasks.tables.relations import Relations

THEN = datetime(2026, 1, 2, tzinfo=UTC)

Source = dict[str, str]
"""Content by path; contents are arbitrary strings, and the label is the folder."""


def sha256_of(content: str) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content.encode()).hexdigest()


class Tables:
    """Tables of one source."""

    def __init__(self, home: Path, **settings: object) -> None:
        """Create empty tables."""
        self._storage = resolve_storage(StorageConfig(home=str(home)))
        self._etl = EtlConfig.model_validate(settings)
        self._ledger: dict[str, dict[str, object]] = {}
        self.images: dict[str, tuple[str, str]] = {}
        self.group_rows: dict[str, str] = {}
        """Group by path, as in the column of a label file."""
        self.hashes: dict[str, int] = {}
        """Perceptual hash by content."""
        self.groups_found: GroupReport | None = None

    def ingest(self, source: Source, *, killed: bool = False, backwards: bool = False) -> dict[str, list[str]]:
        """Synchronize the tables with the source; return, by part, the contents whose split differs from the part's.

        Args:
            source: Files of the source.
            killed: Whether the run ends before the ledger is committed.
            backwards: Whether files are read in reverse order.
        """
        listing = [
            {"path": path, "label": path.split("/")[0], "split": None, "size": len(content), "modified_at": THEN}
            for path, content in source.items()
        ]
        existing = [
            {"sha256": sha256, "label": label, "split": split} for sha256, (label, split) in self.images.items()
        ]
        hashes = [
            {"sha256": sha256_of(content), "dhash": value}
            for content, value in self.hashes.items()
            if sha256_of(content) in self.images
        ]
        rows = [{"path": path, "name": name} for path, name in self.group_rows.items()]
        grouping = Grouping(
            self._etl, pa.Table.from_pylist(rows, GROUPS_ARROW), pa.Table.from_pylist(hashes, HASHES_ARROW)
        )
        with Relations(self._storage) as relations:
            comparison = Comparison(
                relations,
                pa.Table.from_pylist(listing, schema=LISTING_ARROW),
                pa.Table.from_pylist(list(self._ledger.values()), schema=FILES_ARROW),
                pa.Table.from_pylist(existing, schema=IMAGE_KEYS_ARROW),
                replaced=False,
                keep_deleted=self._etl.deleted == "keep",
                rule=SplitRule.of(self._etl),
                grouping=None if self._etl.split_group.by == "none" else grouping,
            )
            read = [self._read(row, source, number) for number, row in enumerate(comparison.to_read().to_pylist())]
            comparison.resolve(pa.Table.from_pylist(read[::-1] if backwards else read, schema=READ_ARROW))
            self.groups_found = comparison.groups_found
            for row in comparison.surplus().to_pylist():
                del self.images[row["sha256"]]
            for sha256, label, split in relations.rows("FROM stored ANTI JOIN existing USING (sha256, label, split)"):
                assert sha256 not in self.images
                self.images[sha256] = (label, split)
            if not killed:
                changes = comparison.ledger_changes(THEN).table()
                self._ledger |= {row["path"]: row for row in changes.to_pylist()}
            edits = [row for batch in comparison.edits()[1] for row in batch.to_pylist()]
            return {
                row["part"]: [
                    sha256 for sha256, split in zip(row["contents"], row["splits"], strict=True) if split is not None
                ]
                for row in edits
            }

    def _read(self, row: dict[str, object], source: Source, number: int) -> dict[str, object]:
        content = source[str(row["path"])]
        sha256 = sha256_of(content)
        written = split_of(sha256, self._etl.split_seed, self._etl.val_fraction, self._etl.test_fraction)
        values = {"sha256": sha256, "split": written, "part": str(number % 3), "dhash": self.hashes.get(content)}
        return row | values | {"reason": None, "detail": None}

    def splits(self) -> dict[str, str]:
        """Return the split by sha256."""
        return {sha256: split for sha256, (_, split) in self.images.items()}

    def split_of(self, content: str) -> str:
        """Return the split of a content."""
        return self.images[sha256_of(content)][1]

    def check_shares(self) -> None:
        """Assert that each split of each class has its share, rounded down or up."""
        shares = SplitRule.of(self._etl).shares
        for label, total in Counter(label for label, _ in self.images.values()).items():
            counts = Counter(split for found, split in self.images.values() if found == label)
            for split in ORDER:
                # One of few images may be in `val`, and one in `test`, which would have none in the whole table.
                most = 2 if split == TRAIN and total <= 5 else 1
                assert abs(counts[split] - shares[split] * total) < most


def images_of(label: str, count: int, first: int = 0) -> Source:
    """Return `count` files of one class, as part of a source."""
    return {f"{label}/{number}.jpg": f"{label}-{number}" for number in range(first, first + count)}
