"""Assignment of images to splits over histories of a source, without Spark."""

import hashlib
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.config.etl import EtlConfig
from tasks.etl.extract import Edges, split_of
from tasks.refs import TEST, TRAIN, VAL
from tests.builders.table_histories import Source, Tables, images_of, sha256_of

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
