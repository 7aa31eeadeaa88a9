"""Assignment of images to splits over histories of a source, without Spark."""

import hashlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.config.etl import EtlConfig
from tasks.config.storage import StorageConfig
from tasks.etl.extract import Edges, split_of
from tasks.etl.outcomes import Comparison
from tasks.etl.stratify import ORDER, SplitRule
from tasks.refs import TEST, TRAIN, VAL
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, READ_ARROW
from tasks.storage import resolve_storage
from tasks.tables.relations import Relations

THEN = datetime(2026, 1, 2, tzinfo=UTC)

Source = dict[str, str]
"""Content by path; contents are arbitrary strings, and the label is the folder."""


def sha256_of(content: str) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content.encode()).hexdigest()


class Tables:
    """Tables of one source as rows, with an ETL that neither reads nor decodes files."""

    def __init__(self, home: Path, **settings: object) -> None:
        """Create empty tables."""
        self._storage = resolve_storage(StorageConfig(home=str(home)))
        self._etl = EtlConfig.model_validate(settings)
        self._ledger: dict[str, dict[str, object]] = {}
        self.images: dict[str, tuple[str, str]] = {}

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
        with Relations(self._storage) as relations:
            comparison = Comparison(
                relations,
                pa.Table.from_pylist(listing, schema=LISTING_ARROW),
                pa.Table.from_pylist(list(self._ledger.values()), schema=FILES_ARROW),
                pa.Table.from_pylist(existing, schema=IMAGE_KEYS_ARROW),
                replaced=False,
                keep_deleted=self._etl.deleted == "keep",
                rule=SplitRule.of(self._etl),
            )
            read = [self._read(row, source, number) for number, row in enumerate(comparison.to_read().to_pylist())]
            comparison.resolve(pa.Table.from_pylist(read[::-1] if backwards else read, schema=READ_ARROW))
            for row in comparison.surplus().to_pylist():
                del self.images[row["sha256"]]
            for sha256, label, split in relations.rows("FROM stored ANTI JOIN existing USING (sha256, label, split)"):
                assert sha256 not in self.images
                self.images[sha256] = (label, split)
            if not killed:
                changes = comparison.ledger_changes(THEN).table()
                self._ledger |= {row["path"]: row for row in changes.to_pylist()}
            edits = [row for batch in comparison.edits().batches() for row in batch.to_pylist()]
            return {
                row["part"]: [
                    sha256 for sha256, split in zip(row["contents"], row["splits"], strict=True) if split is not None
                ]
                for row in edits
            }

    def _read(self, row: dict[str, object], source: Source, number: int) -> dict[str, object]:
        sha256 = sha256_of(source[str(row["path"])])
        written = split_of(sha256, self._etl.split_seed, self._etl.val_fraction, self._etl.test_fraction)
        return row | {"sha256": sha256, "split": written, "part": str(number % 3), "reason": None, "detail": None}

    def splits(self) -> dict[str, str]:
        """Return the split by sha256."""
        return {sha256: split for sha256, (_, split) in self.images.items()}

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


SIX = {path: content for label in "abcdef" for path, content in images_of(label, 30).items()}


def test_each_split_gets_its_share_of_each_of_six_small_classes(tmp_path: Path) -> None:
    """Each class of 30 images has 3 in val and 3 in test, independent of the order in which files are read."""
    tables, again = Tables(tmp_path), Tables(tmp_path)
    tables.ingest(SIX)
    assert Counter(tables.images.values()) == {
        (label, split): number for label in "abcdef" for split, number in ((TEST, 3), (VAL, 3), (TRAIN, 24))
    }
    again.ingest(dict(reversed(SIX.items())), backwards=True)
    assert again.images == tables.images


def test_images_are_assigned_in_the_order_of_a_hash_of_seed_and_content(tmp_path: Path) -> None:
    """Another seed gives another split, and the first images by that hash are in the split `test`."""
    tables, other = Tables(tmp_path), Tables(tmp_path, split_seed=2)
    tables.ingest(SIX)
    other.ingest(SIX)
    assert other.splits() != tables.splits()
    order = sorted(
        (sha256 for sha256, (label, _) in tables.images.items() if label == "a"),
        key=lambda sha256: hashlib.sha256(f"1:{sha256}".encode()).hexdigest(),
    )
    assert [tables.splits()[sha256] for sha256 in order] == [TEST] * 3 + [VAL] * 3 + [TRAIN] * 24


def test_only_reassigned_images_are_rewritten_in_parts(tmp_path: Path) -> None:
    """Of a thousand images of a class, fewer than a hundred get another split than their hash alone gives."""
    tables = Tables(tmp_path)
    changed = tables.ingest(images_of("a", 1000))
    by_hash = {sha256: split_of(sha256, 1, 0.1, 0.1) for sha256 in tables.images}
    expected = {sha256 for sha256, split in tables.splits().items() if split != by_hash[sha256]}
    assert {sha256 for contents in changed.values() for sha256 in contents} == expected
    assert 0 < len(expected) < 100


def test_only_images_near_an_edge_between_two_splits_are_reassigned(tmp_path: Path) -> None:
    """In a large class few images are near an edge, and in a small class most are."""
    large = images_of("a", 5000)
    small = {path: content for label in "bcdef" for path, content in images_of(label, 40).items()}
    copies = {f"a/copy-{number}.jpg": f"a-{number}" for number in range(500)}
    labels = [path.split("/")[0] for path in large | small | copies]
    edges = Edges.of(EtlConfig(), pa.table({"label": [*labels, None]}))
    tables = Tables(tmp_path)

    changed = tables.ingest(large | small | copies)
    reassigned = {sha256 for contents in changed.values() for sha256 in contents}
    near = {sha256 for sha256, (label, _) in tables.images.items() if edges.has(sha256, label)}
    assert reassigned
    assert reassigned <= near
    share = {label: sum(tables.images[sha256][0] == label for sha256 in near) for label in "ab"}
    assert 0 < share["a"] < 500
    assert share["b"] > 20


steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.integers(1, 15), min_size=1),  # new images by class
        st.booleans(),  # whether the run is killed before the ledger is committed
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_no_image_changes_its_split_and_the_fractions_hold_after_killed_runs(tmp_path: Path, steps) -> None:
    """After any sequence of new images and runs killed between their commits, images keep their splits."""
    tables = Tables(tmp_path)
    source: Source = {}
    for number, (new, killed) in enumerate(steps):
        for label, count in new.items():
            source |= images_of(label, count, first=100 * number)
        before = tables.splits()
        tables.ingest(source, killed=killed)
        assert before.items() <= tables.splits().items()
        assert len(tables.images) == len(source)
        tables.check_shares()


@pytest.mark.long
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 39), min_size=1), min_size=2, max_size=5))
def test_restored_image_has_its_former_split(tmp_path: Path, present) -> None:
    """An image that was deleted and is restored, also at another path, gets the split in the ledger."""
    tables = Tables(tmp_path)
    seen: dict[str, str] = {}
    for number, numbers in enumerate(present):
        tables.ingest({f"a/{image}-{number}.jpg": f"a-{image}" for image in numbers})
        for sha256, split in tables.splits().items():
            assert seen.setdefault(sha256, split) == split


def test_image_whose_edit_is_reverted_has_its_former_split(tmp_path: Path) -> None:
    """An edited image gets the split of its path, and the original has it again, also if others were added since."""
    tables = Tables(tmp_path)
    source = images_of("a", 40)
    tables.ingest(source)
    before = tables.splits()
    edited = {path: f"{content}, edited" for path, content in source.items()}
    tables.ingest({path: content for number, (path, content) in enumerate(edited.items()) if number % 2})
    tables.ingest(edited | images_of("a", 25, first=100))
    assert {path: tables.splits()[sha256_of(content)] for path, content in edited.items()} == {
        path: before[sha256_of(content)] for path, content in source.items()
    }
    tables.ingest(source | images_of("a", 60, first=100))
    assert before.items() <= tables.splits().items()
    tables.check_shares()


@pytest.mark.parametrize("killed", [False, True])
def test_image_that_moves_to_another_class_keeps_its_split(tmp_path: Path, killed: bool) -> None:
    """Moved images count in the new class, whose next images go to the other splits."""
    tables = Tables(tmp_path)
    source = images_of("a", 30) | images_of("b", 30)
    tables.ingest(source)
    before = tables.splits()
    moved = {f"b/{path.replace('/', '-')}": content for path, content in images_of("a", 30).items()}
    after = {path: content for path, content in source.items() if path.startswith("b")} | moved
    tables.ingest(after, killed=killed)
    assert tables.splits() == before
    assert {label for label, _ in tables.images.values()} == {"b"}
    tables.ingest(after | images_of("b", 40, first=100))
    tables.check_shares()


def test_image_has_its_former_split_after_a_conflict_is_resolved(tmp_path: Path) -> None:
    """An image under two labels is in none of the splits; an image that never had a split gets one afterwards."""
    tables = Tables(tmp_path)
    source = images_of("a", 30) | images_of("b", 30)
    tables.ingest(source)
    before = tables.splits()
    tables.ingest(source | {"b/copy.jpg": "a-0", "a/new.jpg": "new", "b/new.jpg": "new"})
    assert tables.splits().items() == before.items() - {(sha256_of("a-0"), before[sha256_of("a-0")])}
    tables.ingest(source | {"a/new.jpg": "new"})
    assert tables.splits() == before | {sha256_of("new"): tables.splits()[sha256_of("new")]}


def test_kept_images_of_deleted_files_count(tmp_path: Path) -> None:
    """The assignment of new images takes kept images into account, since training reads them."""
    tables = Tables(tmp_path, deleted="keep")
    tables.ingest(images_of("a", 30))
    tables.ingest(images_of("a", 25, first=100))
    assert len(tables.images) == 55
    tables.check_shares()


def test_copies_have_one_split(tmp_path: Path) -> None:
    """The ledger has the same split for a duplicate as for the stored image."""
    tables = Tables(tmp_path)
    source = images_of("a", 30)
    tables.ingest(source | {f"a/copy-{path[2:]}": content for path, content in source.items()})
    tables.check_shares()
    assert all(row["split"] == tables.splits()[str(row["sha256"])] for row in tables._ledger.values())
