"""Groups of images that have one split, on Delta tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageEnhance

from tasks.checks.preflight import check_pipeline
from tasks.config.pipeline import PipelineConfig
from tasks.errors import WrongInput
from tasks.etl.validate import measure_tables
from tests.builders.delta_rows import newest_rows
from tests.builders.etl_tables import etl_settings, ingest, versions

PATTERN = {"by": "pattern", "pattern": r"(patient\d+)_"}
LABELS = ("cat", "dog")

SEED = 1
"""With split_by content, the patients of this seed are in all splits of both classes."""


def write_bursts(folder: Path, patients: range, images: range) -> None:
    """Write near-duplicates of one smooth image for each patient; even ones are cats, and odd ones dogs."""
    for patient in patients:
        coarse = np.random.default_rng(patient).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        scene = Image.fromarray(coarse).resize((96, 96), Image.Resampling.BICUBIC)
        for image in images:
            path = folder / LABELS[patient % 2] / f"patient{patient}_{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            ImageEnhance.Brightness(scene).enhance(0.9 + 0.02 * image).resize((96 - image, 96 - image)).save(path)


@pytest.fixture
def bursts(tmp_path: Path) -> Path:
    """Return a source of 20 patients with 4 images each."""
    write_bursts(tmp_path / "bursts", range(20), range(4))
    return tmp_path / "bursts"


def splits(spark, storage) -> dict[str, str]:
    """Return the split of each stored file by its path."""
    images = newest_rows(spark, storage.table("images"), "sha256", "split")
    of_content = {row["sha256"]: row["split"] for row in images}
    files = newest_rows(spark, storage.table("files"), "path", "sha256", "split", "outcome")
    stored = {row["path"]: of_content[row["sha256"]] for row in files if row["outcome"] == "stored"}
    assert stored == {row["path"]: row["split"] for row in files if row["outcome"] == "stored"}
    assert len(stored) == len(of_content)
    return stored


def check_groups(found: dict[str, str]) -> None:
    """Assert that all images of a patient have one split, and each split has images of each class."""
    by_patient: dict[str, set[str]] = {}
    for path, split in found.items():
        by_patient.setdefault(path.split("/")[1].split("_")[0], set()).add(split)
    assert [patient for patient, of_patient in by_patient.items() if len(of_patient) > 1] == []
    assert {(path.split("/")[0], split) for path, split in found.items()} == {
        (label, split) for label in LABELS for split in ("train", "val", "test")
    }


@pytest.mark.parametrize("split_by", ["stratified", "content"])
def test_patients_stay_in_one_split_over_runs(spark, bursts, storage, messages_of, caplog, split_by):
    """New images of a patient join the former; a run without groups, or with others, is refused."""
    caplog.set_level("INFO", "lakevision.etl")
    settings = {"split_by": split_by, "split_group": PATTERN, "split_seed": SEED}
    report = ingest(bursts, storage, **settings)
    assert report.stored == 80
    before = splits(spark, storage)
    by_patient = {path.split("_")[0]: split for path, split in before.items()}
    assert all(by_patient[path.split("_")[0]] == split for path, split in before.items())
    assert "80 images are in 20 groups by pattern, and 0 are single" in messages_of("lakevision.etl")
    assert ingest(bursts, storage, **settings).changed is False
    with pytest.raises(WrongInput, match="etl.split_group.by is none, but the table .* was made with pattern"):
        ingest(bursts, storage, split_by=split_by, split_seed=SEED)
    with pytest.raises(WrongInput, match="etl.split_group.by is near_duplicates, but the table .* made with pattern"):
        ingest(bursts, storage, **(settings | {"split_group": {"by": "near_duplicates"}}))
    write_bursts(bursts, range(24), range(4, 6))
    report = ingest(bursts, storage, **settings)
    assert (report.stored, report.read) == (128, 48)
    after = splits(spark, storage)
    assert before.items() <= after.items()
    check_groups(after)
    assert ingest(bursts, storage, **settings).changed is False
    fresh = storage.model_copy(update={"tables": f"{storage.tables}-fresh"})
    ingest(bursts, fresh, **settings)
    check_groups(splits(spark, fresh))
    if split_by == "content":
        assert splits(spark, fresh) == after


def test_column_of_the_label_file_names_the_groups(spark, bursts, storage, messages_of):
    """A number is a name, too; a file without a group is single, and an unknown column leaves no table."""
    file = bursts.parent / "labels.parquet"
    paths = sorted(path.relative_to(bursts).as_posix() for path in bursts.rglob("*.png"))
    numbers = [int(path.split("patient")[1].split("_")[0]) for path in paths]
    labels = [path.split("/")[0] for path in paths]
    frame = pd.DataFrame({"path": paths, "label": labels, "patient": numbers, "video": None})
    frame.loc[0, "label"] = "dog"
    frame.to_parquet(file)
    settings = {"labels": {"by": "file", "file": str(file)}}
    with pytest.raises(WrongInput, match=r"column is 'pateint', but .* has the columns .*: did you mean patient") as no:
        ingest(bursts, storage, **settings, split_group={"by": "column", "column": "pateint"})
    assert no.value.setting == "etl.split_group.column"
    with pytest.raises(WrongInput, match=r"etl.split_group.column is 'video', which names no group in '.*', e.g. of"):
        ingest(bursts, storage, **settings, split_group={"by": "column", "column": "video"})
    assert not Path(storage.tables).exists() or not any(Path(storage.tables).iterdir())
    grouped = {**settings, "split_group": {"by": "column", "column": "patient"}}
    assert ingest(bursts, storage, **grouped).stored == 80
    check_groups(splits(spark, storage))
    (warning,) = [line for line in messages_of("lakevision.etl") if "several labels" in line]
    assert warning == "1 groups of etl.split_group have images of several labels, e.g. '0' (cat 3, dog 1)"
    # The group of a deleted file is known from its row, as long as its image is kept.
    before = splits(spark, storage)
    for path in bursts.glob("*/*_[01].png"):
        path.unlink()
    write_bursts(bursts, range(20), range(4, 5))
    new = [f"{LABELS[number % 2]}/patient{number}_4.png" for number in range(20)]
    more = pd.DataFrame({"path": new, "label": [path[:3] for path in new], "patient": range(20)})
    pd.concat([frame, more]).to_parquet(file)
    ingest(bursts, storage, **grouped, deleted="keep")
    after = {row["path"]: row["split"] for row in newest_rows(spark, storage.table("files"), "path", "split")}
    assert before.items() <= after.items()
    check_groups(after)


def test_near_duplicates_stay_in_one_split_over_runs(spark, bursts, storage):
    """The hashes of the table and of new files are compared, so that data validation finds no pair across splits."""
    settings = {"split_group": {"by": "near_duplicates"}, "near_duplicate_bits": 6}
    first = ingest(bursts, storage, **settings)
    before = splits(spark, storage)
    check_groups(before)
    etl = etl_settings(bursts, **settings)
    assert measure_tables(spark, first, etl, storage).near_duplicates == 0
    write_bursts(bursts, range(22), range(4, 6))
    report = ingest(bursts, storage, **settings)
    after = splits(spark, storage)
    assert before.items() <= after.items()
    check_groups(after)
    assert measure_tables(spark, report, etl, storage).near_duplicates == 0
    assert ingest(bursts, storage, **settings).changed is False
    with pytest.raises(WrongInput, match="etl.near_duplicate_bits is 3, but the table .* was made with 6"):
        ingest(bursts, storage, **(settings | {"near_duplicate_bits": 3}))
    plain = storage.model_copy(update={"tables": f"{storage.tables}-plain"})
    assert measure_tables(spark, ingest(bursts, plain), etl, plain).near_duplicates > 0


def test_group_larger_than_val_and_test_is_in_train_and_named(spark, bursts, storage, messages_of):
    """A source whose splits would be empty is refused before a table changes, by the DAG before a file is read."""
    every = {"by": "pattern", "pattern": r"(patient)"}
    refusal = "is 'pattern', and 1 groups of at most 40 images of a class leave none of 80 images for the split 'val'"
    with pytest.raises(WrongInput, match=refusal) as refused:
        ingest(bursts, storage, split_group=every)
    assert refused.value.setting == "etl.split_group.by"
    assert not list(Path(storage.tables).glob("*/_delta_log/*.json"))
    config = PipelineConfig(
        etl=etl_settings(bursts, split_group=every),
        train={"model": "resnet18", "weights": "none", "freeze_backbone": False},
    )
    with pytest.raises(WrongInput, match="has 2 groups in 2 classes; training needs 4: .*: add 2 groups"):
        check_pipeline(config, storage)
    cats = {"by": "pattern", "pattern": r"(cat/|patient\d+)"}
    ingest(bursts, storage, split_group=cats)
    found = splits(spark, storage)
    assert {split for path, split in found.items() if path.startswith("cat")} == {"train"}
    assert {split for path, split in found.items() if path.startswith("dog")} == {"train", "val", "test"}
    (warning,) = [line for line in messages_of("lakevision.etl") if "few or large groups" in line]
    assert warning.startswith("1 classes have no images in 'val' or 'test', since")
    assert "('cat' 40, largest group 40)" in warning
    assert versions(spark, storage) == (0, 0)
