"""Labels from a pattern or a file, predefined splits, and images of deleted files, on Delta tables."""

import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tasks.errors import WrongInput
from tests.builders.etl_tables import ingest, ledger, stored, versions
from tests.conftest import write_images

SPLITS = ("train", "val", "test")


@pytest.fixture
def predefined(tmp_path) -> Path:
    """Return a source with 3 classes of 2 images in each of the folders train, val and test."""
    for number, split in enumerate(SPLITS):
        write_images(tmp_path / "predefined" / split, per_class=2, first=10 * number)
    return tmp_path / "predefined"


def splits(spark, storage) -> dict[str, str]:
    """Return split by sha256 of the table images."""
    rows = spark.read.format("delta").load(storage.table("images")).select("sha256", "split").collect()
    return {row["sha256"]: row["split"] for row in rows}


def label_file(source: Path, **changes: str | None) -> str:
    """Write a label file with folder names as labels; changes have other labels, or None for a missing row."""
    paths = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    labels = {path: path.split("/")[-2] for path in paths} | changes
    rows = [(path, label) for path, label in labels.items() if label is not None]
    file = source.parent / "labels.csv"
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(file, index=False)
    return str(file)


def test_pattern_labels_the_folders_of_caltech(spark, source, storage):
    """The label excludes the number of a folder, and a folder without a number has no label."""
    for number, label in enumerate(("red", "green", "blue")):
        os.replace(source / label, source / f"{number:03d}.{label}")
    (source / "other").mkdir()
    shutil.copy(source / "000.red" / "000.png", source / "other" / "000.png")
    labels = {"by": "pattern", "pattern": r"^\d+\.([^/]+)/"}
    report = ingest(source, storage, labels=labels)
    assert report.classes.keys() == {"red", "green", "blue"}
    assert ledger(spark, storage)["other/000.png"] == ("quarantined", "label_missing")
    with pytest.raises(WrongInput, match="is 'folder', but .* made with 'pattern'") as refused:
        ingest(source, storage)
    assert refused.value.setting == "etl.labels.by"
    with pytest.raises(WrongInput, match=r"etl.labels.pattern is '\^\(\.\)', but the table"):
        ingest(source, storage, labels={"by": "pattern", "pattern": "^(.)"})
    assert versions(spark, storage) == (0, 0)
    replaced = ingest(source, storage, replace_source=True)
    assert "000.red" in replaced.classes
    assert ingest(source, storage).changed is False


def test_label_file_sets_labels_and_its_changes_reach_the_tables(spark, source, storage):
    """A file without a row is quarantined until it has one, and a corrected label changes the class of the image."""
    # Composed in the label file, and decomposed on the disk; labels of both forms are one class.
    os.replace(source / "red" / "003.png", source / "red" / "e\u0301.png")
    forms = {"red/e\u0301.png": None, "red/\u00e9.png": "ros\u00e9", "red/004.png": "rose\u0301"}
    file = label_file(source, **{"red/000.png": None, "red/001.png": "crimson"} | forms)
    labels = {"by": "file", "file": file}
    report = ingest(source, storage, labels=labels)
    assert (report.stored, report.quarantined) == (59, 1)
    assert ledger(spark, storage)["red/000.png"] == ("quarantined", "label_missing")
    assert report.classes["crimson"]
    assert sum(report.classes["ros\u00e9"].values()) == 2
    assert ledger(spark, storage)["red/e\u0301.png"] == ("stored", None)
    label_file(source, **{"red/002.png": "crimson"} | forms)
    report = ingest(source, storage, labels=labels)
    assert (report.stored, report.quarantined, report.read) == (60, 0, 3)
    assert sorted(stored(spark, storage).values()).count("crimson") == 1
    # A new image is appended by a separate commit, unless a relabelled image is in the same part.
    after = versions(spark, storage)
    assert after in {(1, 1), (2, 1)}
    assert ingest(source, storage, labels=labels).changed is False
    assert versions(spark, storage) == after
    fresh = storage.model_copy(update={"tables": f"{storage.tables}-fresh"})
    ingest(source, fresh, labels=labels)
    assert stored(spark, storage) == stored(spark, fresh)


def test_missing_label_file_is_refused_before_a_table_is_created(source, storage):
    """The error is one sentence, and nothing is written to disk."""
    with pytest.raises(WrongInput, match=r"'/nowhere.csv', which does not exist") as refused:
        ingest(source, storage, labels={"by": "file", "file": "/nowhere.csv"})
    assert refused.value.setting == "etl.labels.file"
    assert not Path(storage.tables).exists()


def test_predefined_splits_are_kept_and_a_moved_file_changes_its_split(spark, predefined, storage):
    """Folders decide the split even of few images; seed and fractions have no effect."""
    report = ingest(predefined, storage, split_by="folder")
    assert report.classes == {label: dict.fromkeys(SPLITS, 2) for label in ("red", "green", "blue")}
    os.replace(predefined / "val" / "red" / "010.png", predefined / "train" / "red" / "moved.png")
    report = ingest(predefined, storage, split_by="folder")
    assert (report.stored, report.classes["red"]) == (18, {"train": 3, "val": 1, "test": 2})
    assert versions(spark, storage) == (1, 1)
    assert ingest(predefined, storage, split_by="folder").changed is False
    with pytest.raises(WrongInput, match="is stratified, but .* was made with folder") as refused:
        ingest(predefined, storage)
    assert refused.value.setting == "etl.split_by"


@pytest.mark.parametrize("copied", ["train/red/zzz.png", "train/red/0.png"])
def test_content_in_two_splits_is_quarantined_until_resolved(spark, predefined, storage, copied):
    """Leaked files are quarantined in any order of paths and times."""
    ingest(predefined, storage, split_by="folder")
    shutil.copy(predefined / "val" / "red" / "010.png", predefined / copied)
    report = ingest(predefined, storage, split_by="folder", max_bad_fraction=0.5)
    found = ledger(spark, storage)
    assert found["val/red/010.png"] == found[copied] == ("quarantined", "split_conflict")
    assert (report.stored, report.quarantined, len(splits(spark, storage))) == (17, 2, 17)
    assert ingest(predefined, storage, split_by="folder", max_bad_fraction=0.5).changed is False
    fresh = storage.model_copy(update={"tables": f"{storage.tables}-fresh"})
    ingest(predefined, fresh, split_by="folder", max_bad_fraction=0.5)
    assert splits(spark, storage) == splits(spark, fresh)
    (predefined / copied).unlink()
    assert ingest(predefined, storage, split_by="folder").stored == 18


def test_image_outside_the_split_folders_is_quarantined(spark, predefined, storage):
    """A file in none of the folders train, val and test has no split."""
    write_images(predefined, per_class=1, first=90)
    ingest(predefined, storage, split_by="folder", max_bad_fraction=0.5)
    assert ledger(spark, storage)["red/090.png"] == ("quarantined", "split_missing")


def test_split_column_of_the_label_file_sets_the_splits(spark, source, storage):
    """A changed split moves the image, although its content is unchanged."""
    paths = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    frame = pd.DataFrame({"path": paths, "label": [path.split("/")[0] for path in paths]})
    frame["split"] = [SPLITS[number % 3] for number in range(len(paths))]
    file = source.parent / "labels.parquet"
    frame.to_parquet(file)
    settings = {"labels": {"by": "file", "file": str(file)}, "split_by": "file"}
    report = ingest(source, storage, **settings)
    assert sum(counts["train"] for counts in report.classes.values()) == 20
    frame.loc[0, "split"] = "test"
    frame.to_parquet(file)
    report = ingest(source, storage, **settings)
    assert (report.read, report.stored) == (1, 60)
    assert sum(counts["train"] for counts in report.classes.values()) == 19
    assert versions(spark, storage) == (1, 1)


def test_images_of_deleted_files_stay_with_deleted_keep(spark, source, storage):
    """The ledger has the outcome deleted, and further runs commit no version."""
    ingest(source, storage)
    (source / "red" / "000.png").unlink()
    (source / "blue" / "001.png").unlink()
    before = stored(spark, storage)
    report = ingest(source, storage, deleted="keep")
    assert (report.stored, report.changed) == (58, True)
    assert ledger(spark, storage)["red/000.png"] == ("deleted", None)
    assert stored(spark, storage) == before
    assert versions(spark, storage) == (0, 1)
    # Repeated runs have nothing to do; kept images count for their class.
    for _ in range(2):
        assert ingest(source, storage, deleted="keep", min_images_per_class=20).changed is False
    assert versions(spark, storage) == (0, 1)
    # A restored file is the same image, and the default removes kept images.
    write_images(source, per_class=1)
    report = ingest(source, storage, deleted="keep")
    assert (report.stored, len(stored(spark, storage))) == (59, 60)
    report = ingest(source, storage)
    assert (report.stored, len(stored(spark, storage))) == (59, 59)


def test_existing_files_take_precedence_over_kept_images(spark, source, storage):
    """A file moved to another class changes the class of its image, and a changed file is a new image."""
    ingest(source, storage)
    os.replace(source / "red" / "000.png", source / "green" / "moved.png")
    ingest(source, storage, deleted="keep")
    found = stored(spark, storage)
    assert sorted(found.values()).count("red") == 19
    assert len(found) == 60
    (source / "red" / "001.png").write_bytes((source / "red" / "002.png").read_bytes()[:-4] + b"xxxx")
    (source / "red" / "003.png").unlink()
    ingest(source, storage, deleted="keep")
    assert len(stored(spark, storage)) == 60
    again = [ingest(source, storage, deleted="keep").changed for _ in range(2)]
    assert again == [False, False]
