"""Labels and predefined splits, from folders, a pattern, or a label file."""

import random
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unicodedata import normalize
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from tasks.config.etl import EtlConfig
from tasks.config.patterns import compile_pattern, find_group
from tasks.errors import WrongInput
from tasks.etl.labels import PathLabels, read_label_file
from tasks.etl.listing import check_source, check_splits, list_images

PYTHON_PATTERNS = [
    r"(\d+)",
    r"(\D+)",
    r"(\w+)",
    r"(\W+)",
    r"(\s+)",
    r"(\S+)",
    r"([^\W_]+)",
    r"([^\W\d_]+)",
    r"([\W_]+)",
    r"([\s\S]*)",
    r"([]a]+)",
    r"([^]a]+)",
    r"([\]\[]+)",
    r"(a{,3})b",
    r"(a{,})",
    r"(a{})",
    r"(\u00f6)",
    r"(x)\Z",
    r"(\ö)",
    r"(\{a\})",
    r"(?i)(Ö+)",
    r"([a-f\d]+)",
    r"([\w-]+)/",
]


def named(*paths: str, **settings: Any) -> list[tuple[str | None, str | None]]:
    """Return label and split of each path under the settings."""
    labels = PathLabels(EtlConfig.model_validate(settings))
    found = labels.of(paths)
    labels.warn()
    return found


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
    """The label is the innermost folder, and None for a file at the top of the source."""
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
    """The label is the group named label or the only group; without a match, or with an empty one, it is None."""
    assert named(path, labels=by_pattern(pattern)) == [(label, None)]


NFC, NFD = "Caf\u00e9", "Cafe\u0301"


@pytest.mark.parametrize(("of_file", "on_disk"), [(NFC, NFD), (NFD, NFC), (NFC, NFC), (NFD, NFD)])
def test_label_file_matches_paths_in_another_form_of_unicode(tmp_path: Path, of_file: str, on_disk: str) -> None:
    """A file name from macOS is decomposed, one typed into a table is composed; both name the same file."""
    file = write(tmp_path / "labels.csv", path=[f"{of_file}/1.jpg", "b/1.jpg"], label=["one", "two"])
    labels = PathLabels(EtlConfig.model_validate({"labels": {"by": "file", "file": file}}))

    assert labels.of([f"{on_disk}/1.jpg", "b/1.jpg"]) == [("one", None), ("two", None)]
    assert labels.absent == set()


def test_label_file_names_files_exactly_where_both_forms_exist(tmp_path: Path) -> None:
    """Paths stay as they are byte for byte, so that two files may have labels of their own."""
    paths = [f"{NFC}/1.jpg", f"{NFD}/1.jpg"]
    file = write(tmp_path / "labels.csv", path=paths, label=["one", "two"])

    assert named(*paths, labels={"by": "file", "file": file}) == [("one", None), ("two", None)]


@pytest.mark.parametrize("pattern", [f"({NFC})", f"({NFD})", r"^(\w+)/", r"(\w+)"])
def test_pattern_matches_paths_in_any_form_of_unicode(pattern: str) -> None:
    """Pattern and path are compared in their composed form, in which an accent is a part of its letter."""
    found = named(f"{NFC}/1.jpg", f"{NFD}/1.jpg", labels=by_pattern(pattern))

    assert [normalize("NFC", str(label)) for label, _split in found] == [NFC, NFC]


def test_label_that_a_pattern_finds_only_in_the_composed_form_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Earlier releases have ended such a label before the accent."""
    named(f"{NFD}/1.jpg", f"{NFD}/2.jpg", "b/1.jpg", labels=by_pattern(r"^(\w+)|^(?:x)"))
    assert caplog.messages == [
        "etl.labels.pattern finds other labels in 2 paths since they are compared in their composed form (NFC): "
        "'Caf\\xe9' in place of 'Cafe'"
    ]


@pytest.mark.parametrize(
    ("folders", "groups"),
    [
        ((NFC, NFD, "b"), ["'Cafe\\u0301' and 'Caf\\xe9'"]),
        (("cat", "cat ", " cat", "dog"), ["' cat', 'cat' and 'cat '"]),
        ((NFC, f"{NFD} ", "b", "b\u00a0"), ["'Cafe\\u0301 ' and 'Caf\\xe9'", "'b' and 'b\\xa0'"]),
        ((NFD, "b"), []),
        (("cat ", "Cat"), []),
    ],
)
def test_labels_that_look_alike_are_one_warning(
    tmp_path: Path, folders: tuple[str, ...], groups: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They are equal after normalizing and stripping; the warning shows the characters in which they differ."""
    for folder in folders:
        (tmp_path / "source" / folder).mkdir(parents=True)
        (tmp_path / "source" / folder / "1.jpg").write_bytes(b"")
    check_source(tmp_path / "source")

    assert len(caplog.messages) == bool(groups)
    for group in groups:
        assert group in "\n".join(caplog.messages)


def test_source_with_one_label_in_two_forms_is_refused(tmp_path: Path) -> None:
    """A classifier needs two classes, and the forms of a label are a single one."""
    for folder in (NFC, NFD):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.jpg").write_bytes(b"")
    with pytest.raises(WrongInput, match="only the class folder 'Caf\u00e9'") as refused:
        check_source(tmp_path)
    assert refused.value.setting == "source"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("twice", ["path", "label"])
def test_label_file_with_a_column_twice_is_refused(tmp_path: Path, suffix: str, twice: str) -> None:
    """The sentence names the column; another column may be there twice."""
    names = ["path", "label", "note", "note", twice]
    table = pa.table([pa.array(["a/1.jpg"])] * 5, names=names)
    file = tmp_path / f"labels{suffix}"
    (pyarrow.csv.write_csv if suffix == ".csv" else pyarrow.parquet.write_table)(table, str(file))

    with pytest.raises(WrongInput, match=f"the column {twice} 2 times") as refused:
        read_label_file(str(file), with_split=False)
    assert refused.value.setting == "etl.labels.file"
    table = table.select([0, 1, 2, 3])
    (pyarrow.csv.write_csv if suffix == ".csv" else pyarrow.parquet.write_table)(table, str(file))
    assert read_label_file(str(file), with_split=False) == {"a/1.jpg": ("a/1.jpg", None)}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (by_pattern("(["), r"pattern is '\(\[', which is not a regular expression .*: correct it"),
        (by_pattern("cat"), "which has 0 groups: put exactly one pair of parentheses around the label"),
        (by_pattern("(a)(b)"), "which has 2 groups"),
        ({"by": "pattern"}, "by is 'pattern', but pattern is empty: set pattern, or leave out by"),
        ({"pattern": "(a)"}, r"pattern is '\(a\)', but by is 'folder', which does not use it: set by"),
        ({"by": "file"}, "by is 'file', but file is empty: set file, or leave out by"),
        ({"file": "labels.csv"}, "file is 'labels.csv', but by is 'folder', which does not use it: set by to 'file'"),
        (by_pattern("(" * 5000 + ")" * 5000), "has 10,000 characters: give at most 4,096"),
        (by_pattern("(" * 1000 + ")" * 1000), "has 2,000 characters: write at most 1,000"),
        (by_pattern("(" * 200 + ")" * 200), "has 200 groups: use at most 100"),
        (by_pattern("(a{99999999999})"), "has a repeat of more than 1,000 times: repeat less"),
        (by_pattern("((a{1000}){1000})"), "has repeats that are too large or go from high to low: repeat less"),
        (by_pattern(r"(\w{900})"), "has repeats that are too large"),
        (by_pattern("(a)(?=b)"), "has lookaround, which is not supported: match the text around the label without it"),
        (by_pattern("(?<!a)(b)"), "has lookaround, which is not supported"),
        (by_pattern(r"(a)\1"), "has a backreference, which is not supported: match the text without it"),
        (by_pattern("(a++)"), "has a possessive or atomic group, which is not supported: leave it out"),
        ({"by": "file", "file": "zip://a.csv::https://host/x.csv"}, "a chain of several URLs: copy the file itself"),
        ({"by": "file", "file": "simplecache::s3://bucket/x.csv"}, "a chain of several URLs"),
        ({"by": "file", "file": "reference://x.csv"}, "whose scheme 'reference' is not one of http, https"),
        ({"by": "file", "file": "labels.xlsx"}, "'labels.xlsx', which ends in neither .csv nor .parquet"),
    ],
)
def test_invalid_label_settings_are_refused_by_validation(settings: dict[str, str], sentence: str) -> None:
    """Invalid settings are refused before files are listed, with the value and the way out."""
    with pytest.raises(ValidationError, match=sentence):
        EtlConfig.model_validate({"labels": settings})


@pytest.mark.parametrize(
    "file",
    [
        "https://host.example/x.csv",
        "http://127.0.0.1:8080/x.csv",
        "http://[::1]:8080/x.csv",
        "s3a://bucket/x.parquet",
        "/data/a::b.csv",
    ],
)
def test_other_label_files_are_accepted(file: str) -> None:
    """Other servers, object stores, and names with two colons are accepted."""
    assert EtlConfig.model_validate({"labels": {"by": "file", "file": file}}).labels.file == file


def test_label_file_over_http_may_be_redirected_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect is followed; a file that is too large to hold in memory is refused."""

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/labels.csv":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"path,label\na,x\n")
                return
            self.send_response(302)
            self.send_header("Location", "/labels.csv")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_port}"
        assert read_label_file(f"{host}/labels.csv", with_split=False) == {"a": ("x", None)}
        assert read_label_file(f"{host}/moved.csv", with_split=False) == {"a": ("x", None)}
        monkeypatch.setattr("tasks.etl.labels.MAX_BYTES", 10)
        with pytest.raises(WrongInput, match="it has more than 0 MB") as refused:
            read_label_file(f"{host}/labels.csv", with_split=False)
        assert refused.value.setting == "etl.labels.file"
        server.shutdown()


def test_local_label_file_may_have_two_colons_in_its_name(tmp_path: Path) -> None:
    """A local path with :: is opened, although fsspec would take it for a chain of URLs."""
    file = write(tmp_path / "a::b.csv", path=["a"], label=["x"])

    assert read_label_file(file, with_split=False) == {"a": ("x", None)}


def test_pattern_with_exponential_backtracking_is_matched_at_once() -> None:
    """A pattern that takes 2**40 steps with Python's re module ends within the test's time limit."""
    assert named(f"{'a' * 40}!/1.jpg", labels=by_pattern("^((a+)+)$".replace("((", "(?P<label>("))) == [(None, None)]


@pytest.mark.parametrize("pattern", PYTHON_PATTERNS)
def test_patterns_find_the_same_text_as_pythons_re(pattern: str) -> None:
    """Unicode classes, classes within brackets, repeats without a lower bound, and escapes match as in Python's re."""
    compiled, python = compile_pattern(pattern), re.compile(pattern)
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(
            draw.choice("aböxABÖ019٣_- \t\x1c\x85\u3000./[]{}:&~\\é²Ⅷ中𐐀") for _ in range(draw.randrange(12))
        )
        found = python.search(text)
        assert find_group(compiled, text, 1) == (found and found[1]), text


def test_splits_from_a_label_file_need_a_label_file() -> None:
    """split_by 'file' is refused unless labels.by is 'file'."""
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
        ("valid/cat/1.jpg", ("cat", "val")),
        ("validation/1.jpg", (None, "val")),
        ("valid/train/1.jpg", ("valid", "train")),
        ("cat/1.jpg", ("cat", None)),
        ("training/cat/1.jpg", ("cat", None)),
    ],
)
def test_first_folder_called_like_a_split_is_the_split(path: str, found: tuple[str | None, str | None]) -> None:
    """Only the first folder with the name of a split is the split, so a class may be called test."""
    assert named(path, split_by="folder") == [found]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (("train/cat/1.jpg", "valid/cat/2.jpg", "test/cat/3.jpg"), "'test', 'train' and 'valid'"),
        (("set/Training/cat/1.jpg", "set/Testing/cat/2.jpg"), "'Testing' and 'Training'"),
        (("train/1.jpg", "test/2.jpg"), None),  # classes of these names
        (("vehicles/train/1.jpg", "vehicles/test/1.jpg"), None),
        (("train/cat/1.jpg", "cat/2.jpg"), None),
        (("val/cat/1.jpg", "test/cat/2.jpg"), None),
    ],
)
def test_folders_that_look_like_splits_are_said_where_they_do_not_split(
    paths: tuple[str, ...], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Their images are mixed, and a benchmark's test images would be trained on."""
    named(*paths)
    named(*paths, split_by="folder")
    sentence = (
        f"the folders {said} look like splits, but etl.split_by is 'stratified': their images are mixed. To keep these "
        "splits, set etl.split_by to 'folder', which needs train, val (or valid) and test"
    )
    assert caplog.messages == ([] if said is None else [sentence])


def test_folders_split_images_that_a_pattern_labels() -> None:
    """Splits by folder can be combined with labels by pattern."""
    assert named("train/001.ak47/1.jpg", split_by="folder", labels=by_pattern(r"\d+\.([^/]+)/")) == [("ak47", "train")]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_label_file_names_labels_and_splits(tmp_path: Path, suffix: str) -> None:
    """CSV and Parquet give the same labels; other columns are ignored, and other paths have no label."""
    columns = {"path": ["a/1.jpg", "./b/2.jpg"], "label": ["cat", "dog"], "split": ["train", "test"], "age": [1, 2]}
    labels = {"by": "file", "file": write(tmp_path / f"labels{suffix}", **columns)}

    assert named("a/1.jpg", "b/2.jpg", "c.jpg", labels=labels, split_by="file") == [
        ("cat", "train"),
        ("dog", "test"),
        (None, None),
    ]
    assert named("a/1.jpg", labels=labels) == [("cat", None)]
    assert named("val/a/1.jpg", "a/1.jpg", labels=labels, split_by="folder") == [(None, "val"), ("cat", None)]


FILES = ("cat/1.jpg", f"dog/{NFD}/2.png", "dog/3 4.JPG")
"""Files of the source `photos`."""


def labelled(folder: Path, rows: dict[str, str], files: tuple[str, ...] = FILES) -> list[str | None]:
    """Return the labels of files in the folder `photos`, in the order of `files`, with these rows in a label file."""
    put(folder / "photos", *files)
    labels = {"by": "file", "file": write(folder / "labels.csv", path=[*rows], label=[*rows.values()])}
    listing = check_source(folder / "photos", EtlConfig.model_validate({"labels": labels})).table()
    found = dict(zip(listing["path"].to_pylist(), listing["label"].to_pylist(), strict=True))
    return [found[file] for file in files]


@pytest.mark.parametrize(
    ("written", "differences"),
    [
        (lambda path: path.replace("/", "\\"), "backslashes"),
        (lambda path: f"/{path}", "the beginning"),
        (lambda path: f"photos/{path}", "the beginning"),
        (lambda path: "C:\\photos\\" + path.replace("/", "\\"), "backslashes, the beginning"),
        (lambda path: f"s3://bucket/photos/{path}", "the beginning"),
        (lambda path: f"/home/me/photos/{path}", "the beginning"),
        (lambda path: f"file:///photos/{quote(path)}", "the beginning"),
        (lambda path: normalize("NFC", path.title()), "upper and lower case"),
        (lambda path: path.rpartition(".")[0], "the extension"),
        (lambda path: path.rpartition(".")[0] + ".jpeg", "the extension"),
    ],
    ids=["backslashes", "slash", "prefix", "drive", "store", "absolute", "file", "case", "no extension", "extension"],
)
def test_path_in_another_notation_is_matched_and_said(
    tmp_path: Path, written: Callable[[str], str], differences: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One row and one file that differ in notation alone belong together."""
    rows = {written(path): label for path, label in zip(FILES, "abc", strict=True)}

    assert labelled(tmp_path, rows) == ["a", "b", "c"]
    (said,) = caplog.messages
    assert said.startswith(
        f"3 of 3 paths in {tmp_path}/labels.csv differ from those in the source in {differences}, e.g."
    )
    assert said.endswith("', which is taken for 'cat/1.jpg'")


def test_file_beside_rows_that_are_all_matched_has_no_label(tmp_path: Path) -> None:
    """No row is left to which it could be the nearest."""
    rows = {"C:\\photos\\a\\1.jpg": "a", "C:\\photos\\b\\2.jpg": "b"}
    assert labelled(tmp_path, rows, ("a/1.jpg", "b/2.jpg", "b/3.jpg")) == ["a", "b", None]


@pytest.mark.parametrize(("row", "file"), [("old/photos/1.jpg", "1.jpg"), ("1.jpg", "old/photos/1.jpg")])
def test_file_gets_no_label_of_another_folder(tmp_path: Path, row: str, file: str) -> None:
    """A folder within the source may have the name of the source; the file of the row was deleted."""
    rows = {row: "a", "x/2.jpg": "b", "x/3.jpg": "c"}
    assert labelled(tmp_path, rows, (file, "x/2.jpg", "x/3.jpg")) == [None, "b", "c"]


@pytest.mark.parametrize(
    ("row", "others", "expected"),
    [
        ("{photos}/1.jpg", ["/other/photos/1.jpg", "/other/photos/x/2.jpg"], ["a", "b", "c"]),
        ("/old/photos/1.jpg", [], ["a", "b", "c"]),
        ("/old/photos/1.jpg", ["/new/photos/x/4.jpg"], [None, "b", "c"]),
    ],
    ids=["own path", "moved", "several"],
)
def test_absolute_paths_of_other_folders_give_no_labels(
    tmp_path: Path, row: str, others: list[str], expected: list[str | None]
) -> None:
    """Folders may end as the source does; the source's own path, or the only such folder, is the source."""
    rows = {row.format(photos=tmp_path / "photos"): "a", "x/2.jpg": "b", "x/3.jpg": "c"} | dict.fromkeys(others, "d")
    assert labelled(tmp_path, rows, ("1.jpg", "x/2.jpg", "x/3.jpg")) == expected


def test_path_that_could_be_several_files_is_matched_with_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is one of several rows for a file; exact rows of other files stay theirs."""
    rows = {"cat/1": "a", "dog/2.JPG": "b", "dog/2.Jpg": "c", "dog/3.jpg": "d", "cat/4.png": "e", "cat\\5.png": "f"}
    files = ("cat/1.jpg", "cat/1.png", "dog/2.jpg", "dog/3.jpg", "dog/3.JPG", "cat/4.png", "cat/5.png")

    assert labelled(tmp_path, rows, files) == [None, None, None, "d", None, "e", "f"]
    assert caplog.messages[1:] == [
        f"3 of 6 paths in {tmp_path}/labels.csv are not in the source, e.g. 'cat/1'; the nearest without a label is "
        "'cat/1.png', which differs in the extension"
    ]


@pytest.mark.parametrize(
    ("row", "nearest"),
    [
        ("kat/1.jpg", "'cat/1.jpg', which differs in the name"),
        ("other/cat/1.jpg", "'cat/1.jpg', which differs in the beginning"),
    ],
)
def test_label_file_of_another_source_is_refused_with_the_nearest_path(tmp_path: Path, row: str, nearest: str) -> None:
    """The folders of another source may have the same names, and other images."""
    with pytest.raises(WrongInput) as refused:
        labelled(tmp_path, {row: "a", "zero.jpg": "b"})
    assert str(refused.value) == (
        f"etl.labels.file is '{tmp_path}/labels.csv', which names no file of the source '{tmp_path}/photos', e.g. "
        f"'{row}'; the nearest without a label is {nearest}: give paths relative to the source"
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_labels_are_taken_as_text(tmp_path: Path, suffix: str) -> None:
    """Class 007 differs from class 7, and NA, null and nan are class names; an empty label is None."""
    labels = ["007", "NA", "null", "nan", ""]
    file = write(tmp_path / f"labels{suffix}", path=list("abcde"), label=labels)

    assert [label for label, _ in read_label_file(file, with_split=False).values()] == [
        "007",
        "NA",
        "null",
        "nan",
        None,
    ]


def test_integer_labels_in_parquet_are_converted_to_text(tmp_path: Path) -> None:
    """The label 3 becomes '3' and not '3.0', even with a null in the column."""
    file = write(tmp_path / "labels.parquet", path=["a", "b"], label=pd.array([3, None], dtype="Int64"))

    assert read_label_file(file, with_split=False) == {"a": ("3", None), "b": (None, None)}


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"file": ["a"], "label": ["x"]}, "has the columns file, label and lacks path, split"),
        (
            {"path": ["a"], "label": ["x"], "split": ["training"]},
            "gives 'a' the split 'training': use train, val, test",
        ),
        ({"path": ["a"], "label": ["x"], "split": [""]}, "gives 'a' the split '': use train, val, test"),
        ({"path": [""], "label": ["x"], "split": ["val"]}, r"has a row without a path \(label 'x'\): remove it"),
        ({"path": ["a", "./a"], "label": ["x", "y"], "split": ["val", "val"]}, "has contradictory rows for 'a'"),
        ({"path": ["a", "a"], "label": ["x", "x"], "split": ["val", "test"]}, "has contradictory rows for 'a'"),
    ],
)
def test_unusable_label_file_is_refused(tmp_path: Path, columns: dict[str, Any], sentence: str) -> None:
    """The message has the problem, the value and the way out."""
    with pytest.raises(WrongInput, match=sentence) as refused:
        read_label_file(write(tmp_path / "labels.csv", **columns), with_split=True)
    assert refused.value.setting == "etl.labels.file"
    assert refused.value.way_out


def test_column_of_groups_is_read_with_the_labels(tmp_path: Path) -> None:
    """A value is text, and an empty one no group; rows of files that the source has no more are kept."""
    columns = {"path": ["a/1.jpg", "A/2.JPG", "e\u0301"], "label": ["x", "y", "x"], "patient": ["007", "", "8"]}
    file = write(tmp_path / "labels.csv", **columns)
    assert read_label_file(file, with_split=False, group="patient") == {
        "a/1.jpg": ("x", None, "007"),
        "A/2.JPG": ("y", None, None),
        "e\u0301": ("x", None, "8"),
    }
    grouped = {"labels": {"by": "file", "file": file}, "split_group": {"by": "column", "column": "patient"}}
    labels = PathLabels(EtlConfig.model_validate(grouped))
    assert labels.of(["a/1.jpg", "a/2.jpg"]) == [("x", None), (None, None)]
    assert labels.groups().to_pylist() == [{"path": "a/1.jpg", "name": "007"}, {"path": "\u00e9", "name": "8"}]


def test_row_in_another_notation_names_the_group_of_its_file(tmp_path: Path) -> None:
    """The path of the file is among the groups, too."""
    file = write(tmp_path / "labels.csv", path=["photos\\a\\1.JPG", "b/2.jpg"], label=["x", "y"], patient=["7", "8"])
    grouped = {"labels": {"by": "file", "file": file}, "split_group": {"by": "column", "column": "patient"}}
    labels = PathLabels(EtlConfig.model_validate(grouped))
    labels.of(["a/1.jpg", "b/2.jpg"])
    assert labels.match_rest(iter(["a/1.jpg"]), "/data/photos")
    assert {"path": "a/1.jpg", "name": "7"} in labels.groups().to_pylist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"patient_id": ["7"]}, "has the columns path, label, patient_id: did you mean patient_id"),
        ({"video": ["7"]}, "has the columns path, label, video: name one of them"),
    ],
)
def test_unknown_column_of_groups_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    """The sentence names the columns of the file."""
    file = write(tmp_path / "labels.csv", path=["a"], label=["x"], **columns)
    with pytest.raises(WrongInput, match=message) as refused:
        read_label_file(file, with_split=False, group="patient")
    assert str(refused.value).startswith(f"etl.split_group.column is 'patient', but '{file}' has")
    assert refused.value.setting == "etl.split_group.column"


def test_two_groups_of_one_path_are_refused(tmp_path: Path) -> None:
    """As two labels are."""
    file = write(tmp_path / "labels.csv", path=["a", "./a"], label=["x", "x"], patient=["7", "8"])
    with pytest.raises(WrongInput, match="has contradictory rows for 'a'"):
        read_label_file(file, with_split=False, group="patient")


def test_repeated_row_is_accepted(tmp_path: Path) -> None:
    """Two equal rows for a path are not a contradiction."""
    file = write(tmp_path / "labels.csv", path=["a", "a"], label=["x", "x"])

    assert read_label_file(file, with_split=False) == {"a": ("x", None)}


def test_missing_and_damaged_label_files_are_refused_by_name(tmp_path: Path) -> None:
    """The message names the file, independent of the library's exception."""
    with pytest.raises(WrongInput, match=r"'.*/gone.csv', which does not exist") as refused:
        read_label_file(str(tmp_path / "gone.csv"), with_split=False)
    assert refused.value.setting == "etl.labels.file"
    for name in ("bad.parquet", "empty.csv"):
        (tmp_path / name).write_bytes(b"" if name == "empty.csv" else b"no parquet")
        with pytest.raises(WrongInput, match=f"{name}', which cannot be read"):
            read_label_file(str(tmp_path / name), with_split=False)


def test_label_file_may_be_a_url(tmp_path: Path) -> None:
    """A file:// URL is read; other schemes need a driver of fsspec."""
    file = write(tmp_path / "my labels.csv", path=["a"], label=["x"])

    assert read_label_file(Path(file).as_uri(), with_split=False) == {"a": ("x", None)}


def put(source: Path, *paths: str) -> None:
    """Write a file at each path below the source."""
    for path in paths:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(b"content")


def test_listing_has_label_and_split(tmp_path: Path) -> None:
    """Label and split are in the listing, before files are read."""
    put(tmp_path, "train/cat/1.jpg", "val/dog/2.jpg", "cat/3.jpg")

    listing = list_images(tmp_path, EtlConfig(split_by="folder")).table()

    rows = {row["path"]: (row["label"], row["split"]) for row in listing.to_pylist()}
    assert rows == {"train/cat/1.jpg": ("cat", "train"), "val/dog/2.jpg": ("dog", "val"), "cat/3.jpg": ("cat", None)}


def test_source_with_a_single_label_by_pattern_is_refused(tmp_path: Path) -> None:
    """The message names the setting of the labels, and not class folders."""
    put(tmp_path, "1.x/a.jpg", "1.x/b.jpg", "y/c.jpg")
    etl = EtlConfig.model_validate({"labels": by_pattern(r"\d+\.([^/]+)/")})

    with pytest.raises(WrongInput, match="only the label by etl.labels.pattern 'x'") as refused:
        check_source(tmp_path, etl)
    assert refused.value.setting == "source"


def test_source_without_split_folders_is_refused_with_splits_by_folder(tmp_path: Path) -> None:
    """A source without split folders is refused, instead of quarantining all its files."""
    put(tmp_path, "cat/1.jpg", "dog/1.jpg")

    with pytest.raises(WrongInput, match="has a folder train, val, test") as refused:
        check_source(tmp_path, EtlConfig(split_by="folder"))
    assert refused.value.setting == "etl.split_by"


def test_training_needs_all_three_predefined_splits(tmp_path: Path) -> None:
    """A missing split is refused before the ETL, and not when the cache is built."""
    put(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "test/cat/2.jpg")
    etl = EtlConfig(split_by="folder")
    listing = check_source(tmp_path, etl)

    with pytest.raises(WrongInput, match="no file into the split 'val'") as refused:
        check_splits(listing, etl)
    assert refused.value.setting == "etl.split_by"
    put(tmp_path, "val/cat/3.jpg")
    check_splits(check_source(tmp_path, etl), etl)
    check_splits(check_source(tmp_path), EtlConfig())
