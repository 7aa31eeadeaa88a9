"""Groups of images that have one split, over histories of a source, without Spark."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.extract import split_of
from tasks.etl.groups import check_groups, groups_by_class
from tasks.etl.listing import list_images
from tasks.refs import TEST, TRAIN, VAL
from tasks.schema import GROUPS_ARROW
from tasks.storage import Storage
from tests.builders.table_histories import Source, Tables, images_of

BY_PATIENT = {"by": "pattern", "pattern": r"(patient\d+)_"}
BY_COLUMN = {"labels": {"by": "file", "file": "labels.csv"}, "split_group": {"by": "column", "column": "patient"}}
NEAR = {"by": "near_duplicates"}


def patients(label: str, numbers: Iterable[int], images: int = 5, first: int = 0) -> Source:
    """Return so many images of each patient of a class."""
    return {
        f"{label}/patient{number}_{image}.png": f"{label} {number} {image}"
        for number in numbers
        for image in range(first, first + images)
    }


def sides(tables: Tables, source: Source) -> dict[str, set[str]]:
    """Return the splits of the images of each patient."""
    found: dict[str, set[str]] = {}
    for path, content in source.items():
        found.setdefault(path.split("/")[1].split("_")[0], set()).add(tables.split_of(content))
    return found


SOURCE = patients("cat", range(10)) | patients("dog", range(10, 20))


@pytest.mark.parametrize("split_by", ["stratified", "content"])
def test_images_of_a_group_have_one_split_whatever_the_order_of_the_files(tmp_path: Path, split_by: str) -> None:
    """The split of a group depends on images and seed alone."""
    tables, again = (Tables(tmp_path, split_by=split_by, split_group=BY_PATIENT) for _ in range(2))
    tables.ingest(SOURCE)
    again.ingest(dict(reversed(SOURCE.items())), backwards=True)
    assert again.images == tables.images
    assert len(tables.images) == 100
    assert all(len(found) == 1 for found in sides(tables, SOURCE).values())
    other = Tables(tmp_path, split_by=split_by, split_group=BY_PATIENT, split_seed=7)
    other.ingest(SOURCE)
    assert other.images != tables.images


def test_fractions_hold_in_every_class_where_groups_allow_it(tmp_path: Path) -> None:
    """Of ten patients of a class, one is in val and one in test."""
    tables = Tables(tmp_path, split_group=BY_PATIENT)
    tables.ingest(SOURCE)
    assert Counter(tables.images.values()) == {
        (label, split): number for label in ("cat", "dog") for split, number in ((TRAIN, 40), (VAL, 5), (TEST, 5))
    }


def test_images_without_a_group_are_split_as_without_groups(tmp_path: Path) -> None:
    """Each is a group of its own, whose split follows from its content."""
    single = images_of("cat", 40) | images_of("dog", 40)
    for split_by in ("stratified", "content"):
        tables, plain = (
            Tables(tmp_path, split_by=split_by, split_group=group) for group in (BY_PATIENT, {"by": "none"})
        )
        tables.ingest(single)
        plain.ingest(single)
        assert tables.groups_found is not None
        assert tables.groups_found.num_others == 80
        if split_by == "stratified":
            assert tables.images == plain.images
        else:
            assert tables.splits() == {sha256: split_of(sha256, 1, 0.1, 0.1) for sha256 in tables.images}


def test_split_by_content_follows_from_the_name_of_the_group_and_the_seed_alone(tmp_path: Path) -> None:
    """Other images of the patient in other tables have the same split; by near-duplicates the contents decide."""
    tables, other = (Tables(tmp_path, split_by="content", split_group=BY_PATIENT) for _ in range(2))
    tables.ingest(SOURCE)
    later = patients("cat", range(10), images=2, first=50) | patients("dog", range(10, 20), images=1, first=70)
    other.ingest(later)
    assert sides(tables, SOURCE) == sides(other, later)
    draws = {
        f"patient{number}": int(hashlib.sha256(f"1:patient{number}".encode()).hexdigest()[:15], 16) / 16**15
        for number in range(20)
    }
    expected = {name: {TEST if draw < 0.1 else VAL if draw < 0.2 else TRAIN} for name, draw in draws.items()}
    assert sides(tables, SOURCE) == expected


@pytest.mark.parametrize("split_by", ["stratified", "content"])
def test_new_members_join_their_group(tmp_path: Path, split_by: str) -> None:
    """So they do in a class that has too few images in another split, and nothing moves."""
    tables = Tables(tmp_path, split_by=split_by, split_group=BY_PATIENT)
    tables.ingest(SOURCE)
    before = tables.splits()
    grown = SOURCE | patients("cat", range(14), first=5) | patients("dog", range(10, 20), first=5)
    tables.ingest(grown)
    assert before.items() <= tables.splits().items()
    assert len(tables.images) == 220
    assert all(len(found) == 1 for found in sides(tables, grown).values())


def test_patient_whose_images_were_deleted_has_the_same_split_again(tmp_path: Path) -> None:
    """The ledger has the split of the former images, and their path tells the group."""
    tables = Tables(tmp_path, split_group=BY_PATIENT)
    tables.ingest(SOURCE)
    before = sides(tables, SOURCE)
    (patient,) = (name for name, found in before.items() if found == {TEST} and int(name[7:]) < 10)
    # Others take its place in the split, so that it would be in train if it were new.
    others = {path: content for path, content in SOURCE.items() if f"/{patient}_" not in path}
    others |= patients("cat", range(20, 30))
    tables.ingest(others)
    returned = patients("cat", [int(patient[7:])], first=90)
    tables.ingest(returned | others)
    assert sides(tables, returned) == {patient: {TEST}}


@pytest.mark.parametrize("values", [{"split_group": BY_PATIENT}, BY_COLUMN, {"split_group": NEAR}])
def test_kept_images_of_deleted_files_count_for_their_group(tmp_path: Path, values: dict[str, object]) -> None:
    """By path, by a label file that still has their rows, and by hash: new images join them."""
    tables = Tables(tmp_path, deleted="keep", **values)
    more = patients("cat", range(10), first=5)
    tables.group_rows = {path: path.split("/")[1].split("_")[0] for path in SOURCE | more}
    tables.hashes = near("cat", range(10), images=10) | near("dog", range(10, 20))
    tables.ingest(SOURCE)
    tables.ingest(more)
    assert len(tables.images) == 150
    assert all(len(found) == 1 for found in sides(tables, SOURCE | more).values())


def test_image_of_two_groups_joins_them(tmp_path: Path) -> None:
    """A copy of one patient's image in the other's folder makes them one group, with one split."""
    tables = Tables(tmp_path, split_group=BY_PATIENT)
    copies = {f"cat/patient{number + 1}_copy.png": f"cat {number} 0" for number in range(0, 10, 2)}
    tables.ingest(SOURCE | copies)
    found = sides(tables, SOURCE)
    assert all(found[f"patient{number}"] == found[f"patient{number + 1}"] for number in range(0, 10, 2))
    assert tables.groups_found is not None
    assert tables.groups_found.largest == {"cat": 10, "dog": 5}


def test_group_of_two_labels_is_in_one_split_and_reported(tmp_path: Path) -> None:
    """A patient with images of both classes counts for both fractions."""
    tables = Tables(tmp_path, split_group=BY_PATIENT)
    mixed = patients("cat", range(20), images=3) | patients("dog", range(20), images=3)
    tables.ingest(mixed)
    assert all(len(found) == 1 for found in sides(tables, mixed).values())
    assert tables.groups_found is not None
    assert tables.groups_found.labels == (20, "'patient0' (cat 3, dog 3)")
    assert Counter(tables.images.values())["cat", TEST] == Counter(tables.images.values())["dog", TEST] == 6


def test_column_names_the_groups(tmp_path: Path) -> None:
    """Also where the file has another form of Unicode than the label file; an image without a value is single."""
    tables = Tables(tmp_path, **BY_COLUMN)
    source = images_of("cat", 50) | images_of("dog", 50) | {"cat/e\u0301.jpg": "accent"}
    tables.group_rows = {path: f"patient {number // 5}" for number, path in enumerate(images_of("cat", 50))}
    tables.group_rows |= {"cat/\u00e9.jpg": "patient 0"}
    tables.ingest(source)
    by_patient: dict[str, set[str]] = {}
    for path, content in images_of("cat", 50).items():
        by_patient.setdefault(tables.group_rows[path], set()).add(tables.split_of(content))
    assert all(len(found) == 1 for found in by_patient.values())
    assert by_patient["patient 0"] == {tables.split_of("accent")}
    assert tables.groups_found is not None
    assert (tables.groups_found.num_groups, tables.groups_found.num_others) == (10, 50)


def near(label: str, bursts: Iterable[int], images: int = 5) -> dict[str, int]:
    """Return perceptual hashes by content: those of a burst differ in 2 bits, and of two bursts in many."""
    return {
        f"{label} {number} {image}": int.from_bytes(hashlib.sha256(f"{label}{number}".encode()).digest()[:7], "big")
        ^ (1 << image)
        for number in bursts
        for image in range(images)
    }


@pytest.mark.parametrize("split_by", ["stratified", "content"])
def test_near_duplicates_have_one_split_and_new_ones_join_them(tmp_path: Path, split_by: str) -> None:
    """The hashes of the table and of the new files are compared; a hash that none is close to is single."""
    tables = Tables(tmp_path, split_by=split_by, split_group=NEAR)
    tables.hashes = near("cat", range(10), images=8) | near("dog", range(10, 20), images=8)
    tables.ingest(SOURCE)
    before = tables.splits()
    grown = SOURCE | patients("cat", range(10), images=3, first=5) | patients("dog", range(10, 20), images=3, first=5)
    tables.ingest(grown | images_of("cat", 3))
    assert before.items() <= tables.splits().items()
    assert all(len(found) == 1 for found in sides(tables, grown).values())
    assert tables.groups_found is not None
    assert (tables.groups_found.num_groups, tables.groups_found.num_others) == (20, 3)


def test_image_between_two_bursts_of_different_splits_moves_nothing_and_is_reported(tmp_path: Path) -> None:
    """It joins the split of most of their images."""
    tables = Tables(tmp_path, split_group=NEAR)
    tables.hashes = near("cat", range(10), images=7) | near("dog", range(10, 20))
    tables.ingest(SOURCE)
    in_test, in_train = (
        next(number for number in range(10) if tables.split_of(f"cat {number} 0") == split) for split in (TEST, TRAIN)
    )
    grown = SOURCE | patients("cat", [in_test], images=7)
    tables.ingest(grown)
    before = tables.splits()
    bridge = tables.hashes[f"cat {in_test} 0"]
    for bit in range(64):  # a chain of images, each one bit from the one before
        if (bridge ^ tables.hashes[f"cat {in_train} 0"]) >> bit & 1:
            bridge ^= 1 << bit
            tables.hashes[f"bridge {bit}"] = bridge
    chain = {f"cat/{content}.png": content for content in tables.hashes if content.startswith("bridge")}
    tables.ingest(grown | chain)
    assert before.items() <= tables.splits().items()
    assert tables.groups_found is not None
    number, example = tables.groups_found.splits
    assert (number, example.split(" (")[1]) == (1, "test 7, train 5)")
    assert {tables.split_of(content) for content in chain.values()} == {TEST}


steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 12), st.integers(1, 4), min_size=1),  # new images by patient
        st.booleans(),  # whether the run is killed before the ledger is committed
    ),
    min_size=1,
    max_size=4,
)


@hypothesis.settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.sampled_from(["stratified", "content"]))
def test_no_group_is_in_two_splits_after_any_history(tmp_path: Path, history, split_by: str) -> None:
    """Images keep their splits, also after runs that were killed between their commits."""
    tables = Tables(tmp_path, split_by=split_by, split_group=BY_PATIENT)
    source: Source = {}
    for number, (new, killed) in enumerate(history):
        for patient, images in new.items():
            source |= patients("ab"[patient % 2], [patient], images=images, first=10 * number)
        before = tables.splits()
        tables.ingest(source, killed=killed)
        assert before.items() <= tables.splits().items()
        assert len(tables.images) == len(source)
        assert all(len(found) == 1 for found in sides(tables, source).values())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"by": "pattern"}, "by is 'pattern', but pattern is empty: set pattern, or leave out by"),
        ({"by": "column"}, "by is 'column', but column is empty: set column, or leave out by"),
        ({"column": "patient"}, "column is 'patient', but by is 'none', which does not use it: set by to 'column'"),
        (
            {"by": "near_duplicates", "pattern": "(a)"},
            r"pattern is '\(a\)', but by is 'near_duplicates', which",
        ),
        ({"by": "pattern", "pattern": "a"}, r"0 groups: put .* around the group, or name its group: \(\?P<group>...\)"),
        ({"by": "pattern", "pattern": "(?P<label>a)(b)"}, "which has 2 groups"),
        ({"by": "pattern", "pattern": "(["}, "which is not a regular expression"),
        ({"by": "column", "column": "patient"}, "is 'column' and labels.by is 'folder', so no file has a column: set"),
    ],
)
def test_invalid_settings_of_groups_are_refused_by_validation(settings: dict[str, str], sentence: str) -> None:
    """The sentence has the value and the way out."""
    with pytest.raises(ValidationError, match=sentence):
        EtlConfig.model_validate({"split_group": settings})
    with pytest.raises(ValidationError, match="by is 'near_duplicates', but split_by is 'folder', which names each"):
        EtlConfig.model_validate({"split_by": "folder", "split_group": NEAR})


def test_pattern_or_column_that_names_no_group_is_refused(tmp_path: Path, storage: Storage, make_images) -> None:
    """The sentence has the value and a path; the groups of others are counted by class."""
    listing = list_images(make_images(per_class=4))
    etl = EtlConfig(split_group={"by": "pattern", "pattern": "(patient)"})
    with pytest.raises(
        WrongInput, match=r"pattern is '\(patient\)', which names no group in '/x', e.g. of 'b.*'"
    ) as no:
        check_groups(listing, GROUPS_ARROW.empty_table(), "/x", etl, storage)
    assert no.value.setting == "etl.split_group.pattern"
    with pytest.raises(WrongInput, match=r"column is 'patient', which names no group"):
        check_groups(listing, GROUPS_ARROW.empty_table(), "/x", EtlConfig(**BY_COLUMN), storage)
    pairs = EtlConfig(split_group={"by": "pattern", "pattern": "(?P<group>.00)[01]|(x)"})
    assert check_groups(listing, GROUPS_ARROW.empty_table(), "/x", pairs, storage) is None
    counted = groups_by_class(listing, GROUPS_ARROW.empty_table(), pairs, storage)
    assert counted == {"red": 3, "green": 3, "blue": 3}
