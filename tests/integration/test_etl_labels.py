"""Labels from a pattern or a file, predefined splits, and what becomes of deleted files: on real tables."""

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
    """Write a label file that calls every image by its folder, but for the changes: other labels, None for no row."""
    paths = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    labels = {path: path.split("/")[-2] for path in paths} | changes
    rows = [(path, label) for path, label in labels.items() if label is not None]
    file = source.parent / "labels.csv"
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(file, index=False)
    return str(file)


def test_a_pattern_labels_the_folders_of_caltech(spark, source, storage):
    """The number before the name is no part of the label, and what has no number has no label."""
    for number, label in enumerate(("red", "green", "blue")):
        os.replace(source / label, source / f"{number:03d}.{label}")
    (source / "other").mkdir()
    shutil.copy(source / "000.red" / "000.png", source / "other" / "000.png")
    labels = {"by": "pattern", "pattern": r"^\d+\.([^/]+)/"}
    report = ingest(source, storage, labels=labels)
    assert report.classes.keys() == {"red", "green", "blue"}
    assert ledger(spark, storage)["other/000.png"] == ("quarantined", "label_missing")
    with pytest.raises(WrongInput, match="etl.labels.by is 'folder', but the table .* was made with 'pattern'"):
        ingest(source, storage)
    with pytest.raises(WrongInput, match=r"etl.labels.pattern is '\^\(\.\)', but the table"):
        ingest(source, storage, labels={"by": "pattern", "pattern": "^(.)"})
    assert versions(spark, storage) == (0, 0)
    replaced = ingest(source, storage, replace_source=True)
    assert "000.red" in replaced.classes
    assert ingest(source, storage).changed is False


def test_a_label_file_decides_and_its_changes_reach_the_tables(spark, source, storage):
    """A path that it does not name is quarantined until it does; a corrected label moves the image."""
    file = label_file(source, **{"red/000.png": None, "red/001.png": "crimson"})
    labels = {"by": "file", "file": file}
    report = ingest(source, storage, labels=labels)
    assert (report.stored, report.quarantined) == (59, 1)
    assert ledger(spark, storage)["red/000.png"] == ("quarantined", "label_missing")
    assert report.classes["crimson"]
    label_file(source, **{"red/002.png": "crimson"})
    report = ingest(source, storage, labels=labels)
    assert (report.stored, report.quarantined, report.read) == (60, 0, 3)
    assert sorted(stored(spark, storage).values()).count("crimson") == 1
    # An image that is new is appended by a commit of its own, unless one that moved is in the same part.
    after = versions(spark, storage)
    assert after in {(1, 1), (2, 1)}
    assert ingest(source, storage, labels=labels).changed is False
    assert versions(spark, storage) == after
    fresh = storage.model_copy(update={"tables": f"{storage.tables}-fresh"})
    ingest(source, fresh, labels=labels)
    assert stored(spark, storage) == stored(spark, fresh)


def test_a_label_file_that_is_missing_is_refused_before_a_table_is_made(source, storage):
    """One sentence, and nothing on disk."""
    with pytest.raises(WrongInput, match=r"etl.labels.file is '/nowhere.csv', which does not exist: check the path"):
        ingest(source, storage, labels={"by": "file", "file": "/nowhere.csv"})
    assert not Path(storage.tables).exists()


def test_predefined_splits_are_kept_and_a_moved_image_moves(spark, predefined, storage):
    """Folders decide, however few images there are; seed and fractions have no say."""
    report = ingest(predefined, storage, split_by="folder")
    assert report.classes == {label: dict.fromkeys(SPLITS, 2) for label in ("red", "green", "blue")}
    os.replace(predefined / "val" / "red" / "010.png", predefined / "train" / "red" / "moved.png")
    report = ingest(predefined, storage, split_by="folder")
    assert (report.stored, report.classes["red"]) == (18, {"train": 3, "val": 1, "test": 2})
    assert versions(spark, storage) == (1, 1)
    assert ingest(predefined, storage, split_by="folder").changed is False
    with pytest.raises(WrongInput, match="etl.split_by is stratified, but the table .* was made with folder"):
        ingest(predefined, storage)


@pytest.mark.parametrize("copied", ["train/red/zzz.png", "train/red/0.png"])
def test_one_content_in_two_splits_is_quarantined_until_it_is_settled(spark, predefined, storage, copied):
    """Leakage, whichever file comes first in the listing or in time."""
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


def test_a_image_in_no_split_folder_is_quarantined(spark, predefined, storage):
    """Nobody said where it belongs."""
    write_images(predefined, per_class=1, first=90)
    ingest(predefined, storage, split_by="folder", max_bad_fraction=0.5)
    assert ledger(spark, storage)["red/090.png"] == ("quarantined", "split_missing")


def test_the_label_files_column_splits(spark, source, storage):
    """And an image whose split it changes is moved, its content not having changed."""
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


def test_images_of_deleted_files_stay_where_they_are_to_be_kept(spark, source, storage):
    """The ledger says deleted, and more runs in a row give no more versions."""
    ingest(source, storage)
    (source / "red" / "000.png").unlink()
    (source / "blue" / "001.png").unlink()
    before = stored(spark, storage)
    report = ingest(source, storage, deleted="keep")
    assert (report.stored, report.changed) == (58, True)
    assert ledger(spark, storage)["red/000.png"] == ("deleted", None)
    assert stored(spark, storage) == before
    assert versions(spark, storage) == (0, 1)
    # Nothing to do, however often; a class counts what is kept.
    for _ in range(2):
        assert ingest(source, storage, deleted="keep", min_images_per_class=20).changed is False
    assert versions(spark, storage) == (0, 1)
    # A file that comes back is the same image, and the default takes out what was kept.
    write_images(source, per_class=1)
    report = ingest(source, storage, deleted="keep")
    assert (report.stored, len(stored(spark, storage))) == (59, 60)
    report = ingest(source, storage)
    assert (report.stored, len(stored(spark, storage))) == (59, 59)


def test_living_files_decide_over_kept_images(spark, source, storage):
    """A file moved to another class is that class, a content under two labels is none, and a changed file is new."""
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
