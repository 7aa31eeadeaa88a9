"""Labels and predefined splits of paths, from folders, a regular expression, or a label file."""

import io
import logging
import urllib.request
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from tasks.config.etl import EtlConfig
from tasks.config.patterns import compile_pattern, find_group
from tasks.config.values import check_remote_file, is_url
from tasks.errors import WrongInput
from tasks.paths import expand_user, local_path
from tasks.refs import SPLITS
from tasks.text.forms import as_known, composed, look_alikes, shown

logger = logging.getLogger("lakevision.etl")

MAX_GROUPS = 5
"""Maximum number of groups of similar labels that a warning names."""

TIMEOUT_SECONDS = 60
"""Longest wait for the server of a label file over HTTP."""

MAX_BYTES = 256 << 20
"""Maximum size of a label file over HTTP, which is read into memory: millions of labels."""

Named = tuple[str | None, str | None]
"""Label and predefined split of a path, None if it has none."""


def _folders(path: str) -> list[str]:
    # As pathlib, which takes ten times as long.
    return [folder for folder in path.split("/")[:-1] if folder not in {"", "."}]


def split_from_folders(path: str) -> str | None:
    """Return the first folder of the path that is called train, val or test, or None."""
    return next((folder for folder in _folders(path) if folder in SPLITS), None)


def label_from_folder(path: str, split: str | None = None) -> str | None:
    """Return the innermost folder that does not name the split, or None: train/1.jpg has no label."""
    folders = _folders(path)
    if split is not None:
        folders.remove(split)  # only the first match: the class of train/test/1.jpg is test
    return folders[-1] if folders else None


def read_label_file(file: str, with_split: bool) -> dict[str, Named]:
    """Read a CSV or Parquet file with the columns path and label, and split if `with_split`.

    Returns:
        Label and split by path; an empty or null label is None.

    Raises:
        WrongInput: The file is missing or damaged, lacks a column, or has contradictory rows for one path.
    """
    wanted = ["path", "label", "split"] if with_split else ["path", "label"]
    table = _read_table(file)
    for name in wanted:
        if (count := table.column_names.count(name)) > 1:
            raise _unusable(file, f"has the column {name} {count} times", "keep one of them")
    lacking = [name for name in wanted if name not in table.column_names]
    if lacking:
        found = f"has the columns {', '.join(table.column_names)} and lacks {', '.join(lacking)}"
        raise _unusable(file, found, f"name its columns {', '.join(wanted)}")
    try:
        columns = [table[name].cast(pa.string()).to_pylist() for name in wanted]
    except pa.ArrowException as error:
        raise WrongInput(
            f"etl.labels.file is '{file}', whose columns are not text ({error})",
            setting="etl.labels.file",
            way_out=f"write {', '.join(wanted)} as text",
        ) from None
    named: dict[str, Named] = {}
    for path, label, *rest in zip(*columns, strict=True):
        split = rest[0] if rest else None
        if not path:
            raise _unusable(file, f"has a row without a path (label '{label}')", "remove it")
        if with_split and split not in SPLITS:
            raise _unusable(file, f"gives '{path}' the split '{split}'", f"use {', '.join(SPLITS)}")
        key = str(PurePosixPath(path))  # ./cat/1.jpg and cat/1.jpg are the same path
        if named.setdefault(key, (label or None, split)) != (label or None, split):
            raise _unusable(file, f"has contradictory rows for '{key}'", "keep one of them")
    return named


def _open(file: str, path: Path | None) -> Any:
    if path is not None:
        return expand_user(path).open("rb")  # not with fsspec, which takes a name with :: for a chain of URLs
    if not file.lower().startswith("http"):
        return fsspec.open(file, "rb")
    with urllib.request.urlopen(file, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310  # the scheme was checked
        content = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"it has more than {MAX_BYTES >> 20} MB: copy it to a folder, and give its path or URL")
    return io.BytesIO(content)


def _unusable(file: str, problem: str, way_out: str) -> WrongInput:
    return WrongInput(f"etl.labels.file is '{file}', which {problem}", setting="etl.labels.file", way_out=way_out)


def _read_table(file: str) -> pa.Table:
    path = None if is_url(file) else local_path(file)
    if path is None:
        try:
            check_remote_file(file)
        except WrongInput as error:
            text = f"etl.labels.file: {error}"
            raise WrongInput.complete(text, setting="etl.labels.file", way_out=error.way_out) from None
    try:
        with _open(file, path) as opened:
            if file.lower().endswith(".parquet"):
                return pyarrow.parquet.ParquetFile(opened).read()  # read_table refuses a column that is there twice
            # Read as text: class 007 differs from class 7, and NA and null are valid class names.
            names = ("path", "label", "split")
            options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            return pyarrow.csv.read_csv(opened, convert_options=options)
    except FileNotFoundError:
        raise _unusable(file, "does not exist", "check the path") from None
    except Exception as error:  # Each file system and format raises its own exceptions.
        raise _unusable(file, f"cannot be read ({error})", "give a readable CSV or Parquet file") from error


class _PatternLabels:
    """Labels by a pattern, which is matched with paths in their composed form.

    Attributes:
        changed: Number of paths with another label than the pattern finds in the path as it is.
        example: Labels of one of these paths: in its composed form, and as it is.
    """

    def __init__(self, pattern: str) -> None:
        self.changed = 0
        self.example = ("", "")
        self._is_composed = composed(pattern) == pattern
        self._exact, self._composed = compile_pattern(pattern), compile_pattern(composed(pattern))
        self._group = self._exact.groupindex.get("label", 1)

    def of(self, path: str) -> str | None:
        """Return the label of a path, or None."""
        exact = find_group(self._exact, path, self._group) or None
        if self._is_composed and composed(path) == path:
            return exact
        found = find_group(self._composed, composed(path), self._group) or None
        # A label that differs only in its form stays as it is: the table may have that form.
        if found is None or (exact is not None and composed(exact) == found):
            return exact
        if exact is not None:
            self.changed, self.example = self.changed + 1, (found, exact)
        return found


class PathLabels:
    """Labels and predefined splits of paths according to the settings."""

    def __init__(self, etl: EtlConfig) -> None:
        """Read the label file, if there is one.

        Raises:
            WrongInput: As `read_label_file`.
        """
        self._etl = etl
        self._named: dict[str, Named] = {}
        self._pattern: _PatternLabels | None = None
        self._found: set[str | None] = set()
        if etl.labels.by == "file":
            assert etl.labels.file is not None, "the form refuses it"
            self._named = read_label_file(etl.labels.file, with_split=etl.split_by == "file")
        elif etl.labels.by == "pattern":
            assert etl.labels.pattern is not None, "the form refuses it"
            self._pattern = _PatternLabels(etl.labels.pattern)
        self.absent = set(self._named)
        """Paths of the label file that were not asked for."""
        self._row_of = as_known(self._named.keys())

    def of(self, paths: Sequence[str]) -> list[Named]:
        """Return label and predefined split of each path, which is relative to the source.

        Labels have the form of the source: `Comparison` gives them the form of the table.
        """
        found = self._of(paths)
        self._found.update({label for label, _ in found})
        return found

    def _of(self, paths: Sequence[str]) -> list[Named]:
        by_folder = self._etl.split_by == "folder"
        if self._etl.labels.by == "file":
            rows = [self._row_of(path) for path in paths]
            self.absent.difference_update(rows)
            found = [self._named.get(row, (None, None)) for row in rows]
            if not by_folder:
                return found
            return [(label, split_from_folders(path)) for path, (label, _) in zip(paths, found, strict=True)]
        if self._etl.labels.by == "folder":
            # Both follow from the folders: computed once per folder, and the same for all its files.
            of_folder: dict[str, Named] = {}
            folders = [path[: path.rfind("/") + 1] for path in paths]
            for folder in set(folders):
                split = split_from_folders(folder) if by_folder else None
                of_folder[folder] = (label_from_folder(folder, split), split)
            return [of_folder[folder] for folder in folders]
        assert self._pattern is not None, "labels are by folder, file or pattern"
        return [(self._pattern.of(path), split_from_folders(path) if by_folder else None) for path in paths]

    def warn(self) -> None:
        """Log a warning of paths that only the label file has, of labels that look alike, and of those that changed."""
        if self.absent:
            logger.warning(
                "%d of %d paths in %s are not in the source, e.g. '%s'",
                len(self.absent), len(self._named), self._etl.labels.file, min(self.absent),
            )  # fmt: skip
        if groups := look_alikes(label for label in self._found if label is not None):
            logger.warning(
                "labels that look alike: %s%s. Forms of Unicode are one class, unless the table has several. Spaces "
                "around a label make another class: give images of one class one label",
                "; ".join(map(shown, groups[:MAX_GROUPS])),
                f"; and {len(groups) - MAX_GROUPS} more groups" if len(groups) > MAX_GROUPS else "",
            )
        if self._pattern is not None and self._pattern.changed:
            logger.warning(
                "etl.labels.pattern finds other labels in %d paths since they are compared in their composed form "
                "(NFC): %s in place of %s",
                self._pattern.changed, *map(ascii, self._pattern.example),
            )  # fmt: skip
