"""Labels and predefined splits, from folders, a pattern, or a label file."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import ValidationError

from tasks.config import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.labels import name_paths, read_label_file
from tasks.etl.listing import check_source, check_splits, list_images


def named(*paths: str, **settings: Any) -> list[tuple[str | None, str | None]]:
    """Return label and split of each path under the settings."""
    return name_paths(paths, EtlConfig.model_validate(settings))


def by_pattern(pattern: str) -> dict[str, str]:
    """Return the label settings of a pattern."""
    return {"by": "pattern", "pattern": pattern}


def write(file: Path, /, **columns: list[Any]) -> str:
    """Write a label file in the format of its suffix, and return its path."""
    frame = pd.DataFrame(columns)
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_parquet(file)
    return str(file)


def test_parent_folder_is_the_label() -> None:
    """The innermost folder, and none at the top."""
    assert named("animals/cat/1.jpg", "1.jpg") == [("cat", None), (None, None)]


@pytest.mark.parametrize(
    ("pattern", "path", "label"),
    [
        (r"\d+\.([^/]+)/", "001.ak47/001_0001.jpg", "ak47"),
        (r"(?P<label>[a-z]+)_(\d+)\.jpg$", "all/cat_0001.jpg", "cat"),
        (r"^(?:[^/]+)/(\w+)/", "set-a/größe/1.jpg", "größe"),
        (r"\d+\.([^/]+)/", "cat/1.jpg", None),
        (r"^([a-z]*)_", "x/_1.jpg", None),
        (r"^([a-z]*)_", "_1.jpg", None),
    ],
)
def test_pattern_finds_the_label_anywhere_in_the_path(pattern: str, path: str, label: str | None) -> None:
    """The group named label, or the only one; where nothing or an empty text is found there is no label."""
    assert named(path, labels=by_pattern(pattern)) == [(label, None)]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (by_pattern("(["), r"pattern is '\(\[', which is no regular expression .*: mend it"),
        (by_pattern("cat"), "which has 0 groups: put exactly one pair of parentheses around the label"),
        (by_pattern("(a)(b)"), "which has 2 groups"),
        ({"by": "pattern"}, "by is 'pattern', but pattern is empty: set pattern, or leave out by"),
        ({"pattern": "(a)"}, r"pattern is '\(a\)', but by is 'folder', which has no use for it: set by"),
        ({"by": "file"}, "by is 'file', but file is empty: set file, or leave out by"),
        ({"file": "labels.csv"}, "file is 'labels.csv', but by is 'folder', which has no use for it: set by to 'file'"),
        ({"by": "file", "file": "labels.xlsx"}, "'labels.xlsx', which ends in neither .csv nor .parquet"),
    ],
)
def test_settings_that_cannot_name_a_label_are_refused_in_the_form(settings: dict[str, str], sentence: str) -> None:
    """Before any file is listed, with the value and the way out."""
    with pytest.raises(ValidationError, match=sentence):
        EtlConfig.model_validate({"labels": settings})


def test_splits_from_a_label_file_need_a_label_file() -> None:
    """There is no other file that could name them."""
    with pytest.raises(ValidationError, match="split_by is 'file' and labels.by is 'folder', so no file names a split"):
        EtlConfig(split_by="file")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("train/cat/1.jpg", ("cat", "train")),
        ("val/cat/1.jpg", ("cat", "val")),
        ("set-1/test/cat/1.jpg", ("cat", "test")),
        ("cat/train/1.jpg", ("cat", "train")),
        ("train/test/1.jpg", ("test", "train")),
        ("train/cat/test.jpg", ("cat", "train")),
        ("train/1.jpg", (None, "train")),
        ("cat/1.jpg", ("cat", None)),
        ("training/cat/1.jpg", ("cat", None)),
    ],
)
def test_first_folder_called_like_a_split_is_the_split(path: str, found: tuple[str | None, str | None]) -> None:
    """A class may be called test, and a split folder is never a class."""
    assert named(path, split_by="folder") == [found]


def test_folders_split_pictures_that_a_pattern_labels() -> None:
    """The two rules do not know each other."""
    assert named("train/001.ak47/1.jpg", split_by="folder", labels=by_pattern(r"\d+\.([^/]+)/")) == [("ak47", "train")]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_label_file_names_labels_and_splits(tmp_path: Path, suffix: str) -> None:
    """Both formats say the same; other columns are left alone, and what is not named has no label."""
    columns = {"path": ["a/1.jpg", "./b/2.jpg"], "label": ["cat", "dog"], "split": ["train", "test"], "age": [1, 2]}
    labels = {"by": "file", "file": write(tmp_path / f"labels{suffix}", **columns)}

    assert named("a/1.jpg", "b/2.jpg", "c.jpg", labels=labels, split_by="file") == [
        ("cat", "train"),
        ("dog", "test"),
        (None, None),
    ]
    assert named("a/1.jpg", labels=labels) == [("cat", None)]
    assert named("val/a/1.jpg", "a/1.jpg", labels=labels, split_by="folder") == [(None, "val"), ("cat", None)]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_labels_are_taken_as_text(tmp_path: Path, suffix: str) -> None:
    """The class 007 is not the class 7, and NA, null and nan are names; an empty one is none."""
    labels = ["007", "NA", "null", "nan", ""]
    file = write(tmp_path / f"labels{suffix}", path=list("abcde"), label=labels)

    assert [label for label, _ in read_label_file(file, with_split=False).values()] == [
        "007",
        "NA",
        "null",
        "nan",
        None,
    ]


def test_numbers_as_labels_in_parquet_are_their_text(tmp_path: Path) -> None:
    """With a null among them pandas would make 3 a 3.0."""
    file = write(tmp_path / "labels.parquet", path=["a", "b"], label=pd.array([3, None], dtype="Int64"))

    assert read_label_file(file, with_split=False) == {"a": ("3", None), "b": (None, None)}


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"file": ["a"], "label": ["x"]}, "has the columns file, label and lacks path, split: name its columns path"),
        (
            {"path": ["a"], "label": ["x"], "split": ["training"]},
            "gives 'a' the split 'training': use train, val, test",
        ),
        ({"path": ["a"], "label": ["x"], "split": [""]}, "gives 'a' the split '': use train, val, test"),
        ({"path": [""], "label": ["x"], "split": ["val"]}, r"has a row without a path \(label 'x'\): remove it"),
        ({"path": ["a", "./a"], "label": ["x", "y"], "split": ["val", "val"]}, "says two things of 'a'"),
        ({"path": ["a", "a"], "label": ["x", "x"], "split": ["val", "test"]}, "says two things of 'a'"),
    ],
)
def test_label_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, columns: dict[str, Any], sentence: str) -> None:
    """What, its value, and the way out."""
    with pytest.raises(WrongInput, match=sentence):
        read_label_file(write(tmp_path / "labels.csv", **columns), with_split=True)


def test_same_row_twice_is_one(tmp_path: Path) -> None:
    """Only what contradicts itself is refused."""
    file = write(tmp_path / "labels.csv", path=["a", "a"], label=["x", "x"])

    assert read_label_file(file, with_split=False) == {"a": ("x", None)}


def test_missing_and_damaged_label_files_are_one_sentence(tmp_path: Path) -> None:
    """Whatever the format's library says, the file is named."""
    with pytest.raises(WrongInput, match=r"etl.labels.file is '.*/gone.csv', which does not exist: check the path"):
        read_label_file(str(tmp_path / "gone.csv"), with_split=False)
    for name in ("bad.parquet", "empty.csv"):
        (tmp_path / name).write_bytes(b"" if name == "empty.csv" else b"no parquet")
        with pytest.raises(WrongInput, match=f"{name}', which cannot be read"):
            read_label_file(str(tmp_path / name), with_split=False)


def test_label_file_may_be_a_url(tmp_path: Path) -> None:
    """file:// and whatever else fsspec has a driver for."""
    file = write(tmp_path / "my labels.csv", path=["a"], label=["x"])

    assert read_label_file(Path(file).as_uri(), with_split=False) == {"a": ("x", None)}


def put(source: Path, *paths: str) -> None:
    """Write a file at each path below the source."""
    for path in paths:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(b"content")


def test_listing_carries_label_and_split(tmp_path: Path) -> None:
    """What the path says is known before anything is read."""
    put(tmp_path, "train/cat/1.jpg", "val/dog/2.jpg", "cat/3.jpg")

    listing = list_images(tmp_path, EtlConfig(split_by="folder"))

    rows = {row["path"]: (row["label"], row["split"]) for row in listing.to_pylist()}
    assert rows == {"train/cat/1.jpg": ("cat", "train"), "val/dog/2.jpg": ("dog", "val"), "cat/3.jpg": ("cat", None)}


def test_source_in_which_the_rule_finds_one_label_is_refused(tmp_path: Path) -> None:
    """The sentence names the rule, not class folders that nobody asked for."""
    put(tmp_path, "1.x/a.jpg", "1.x/b.jpg", "y/c.jpg")
    etl = EtlConfig.model_validate({"labels": by_pattern(r"\d+\.([^/]+)/")})

    with pytest.raises(WrongInput, match="only the label by etl.labels.pattern 'x': a classifier needs at least two"):
        check_source(tmp_path, etl)


def test_source_without_split_folders_is_refused_where_folders_split(tmp_path: Path) -> None:
    """Not a quarantine of everything."""
    put(tmp_path, "cat/1.jpg", "dog/1.jpg")

    with pytest.raises(
        WrongInput, match="etl.split_by is 'folder', but no path below .* has a folder train, val, test"
    ):
        check_source(tmp_path, EtlConfig(split_by="folder"))


def test_training_needs_all_three_predefined_splits(tmp_path: Path) -> None:
    """Said before the ETL, where the cache would refuse it after."""
    put(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "test/cat/2.jpg")
    etl = EtlConfig(split_by="folder")
    listing = check_source(tmp_path, etl)

    with pytest.raises(WrongInput, match="etl.split_by is 'folder', which puts no file into the split 'val'"):
        check_splits(listing, etl)
    put(tmp_path, "val/cat/3.jpg")
    check_splits(check_source(tmp_path, etl), etl)
    check_splits(check_source(tmp_path), EtlConfig())
