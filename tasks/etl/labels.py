"""Labels and predefined splits of paths, from folders, a regular expression, or a label file."""

import difflib
import io
import logging
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from tasks.config.etl import EtlConfig
from tasks.config.patterns import compile_pattern, find_group
from tasks.config.values import check_remote_file, is_url
from tasks.errors import WrongInput, similar_names
from tasks.etl.choice import EXTENSIONS
from tasks.paths import expand_user, local_path
from tasks.refs import SPLITS, TEST, TRAIN, VAL
from tasks.schema import GROUPS_ARROW
from tasks.text.forms import as_known, composed, look_alikes, shown

logger = logging.getLogger("lakevision.etl")

MAX_GROUPS = 5
"""Maximum number of groups of similar labels that a warning names."""

TIMEOUT_SECONDS = 60
"""Longest wait for the server of a label file over HTTP."""

MAX_BYTES = 256 << 20
"""Maximum size of a label file over HTTP, which is read into memory: millions of labels."""

SPLIT_FOLDERS = {TRAIN: TRAIN, VAL: VAL, "valid": VAL, "validation": VAL, TEST: TEST}
"""Splits by the names of their folders."""

LIKE_SPLITS = SPLIT_FOLDERS | {"training": TRAIN, "testing": TEST}
"""The same with further names, in lower case, which may as well be those of classes."""

EXTENSION = re.compile(f"({'|'.join(map(re.escape, EXTENSIONS))})$", re.IGNORECASE)

NUM_COMPARED = 1000
"""Number of files without a label among which the nearest to a row of the label file is searched."""

Named = tuple[str | None, ...]
"""Label and predefined split of a path, None if it has none; and its group, where a column has one."""


def named_by_folders(path: str, with_split: bool) -> Named:
    """Return the innermost folder of a path as its label, and the split of the first folder with the name of one.

    The folder that names the split is not the label: train/1.jpg has none. No other split folder counts: the class of
    train/test/1.jpg is test. Other names than those of the splits count in paths without these: a class may be valid.
    """
    # As pathlib, which takes ten times as long.
    folders = [folder for folder in path.split("/")[:-1] if folder not in {"", "."}]
    known = (folder for names in (SPLITS, SPLIT_FOLDERS) for folder in folders if folder in names)
    named = next(known, None) if with_split else None
    if named is not None:
        folders.remove(named)  # the first
    return (folders[-1] if folders else None), SPLIT_FOLDERS.get(named or "")


def read_label_file(file: str, with_split: bool, group: str | None = None) -> dict[str, Named]:
    """Read a CSV or Parquet file with the columns path and label, split if `with_split`, and the column `group`.

    Returns:
        Label, split and, with a column `group`, its value by path; an empty or null label or group is None.

    Raises:
        WrongInput: The file is missing or damaged, lacks a column, or has contradictory rows for one path.
    """
    wanted = ["path", "label", *(["split"] if with_split else []), *([group] if group else [])]
    table = _read_table(file, wanted)
    for name in wanted:
        if (count := table.column_names.count(name)) > 1:
            raise _unusable(file, f"has the column {name} {count} times", "keep one of them")
    lacking = [name for name in wanted if name not in table.column_names]
    if lacking == [group]:
        raise WrongInput(
            f"etl.split_group.column is '{group}', but '{file}' has the columns {', '.join(table.column_names)}",
            setting="etl.split_group.column",
            way_out=similar_names(str(group), table.column_names, "name one of them"),
        )
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
        split = rest[0] if with_split else None
        if not path:
            raise _unusable(file, f"has a row without a path (label '{label}')", "remove it")
        if with_split and split not in SPLITS:
            raise _unusable(file, f"gives '{path}' the split '{split}'", f"use {', '.join(SPLITS)}")
        key = str(PurePosixPath(path))  # ./cat/1.jpg and cat/1.jpg are the same path
        row = (label or None, split, *([rest[-1] or None] if group else []))
        if named.setdefault(key, row) != row:
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


def _read_table(file: str, texts: Iterable[str]) -> pa.Table:
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
            options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
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


class _Notation:
    """Comparison of paths that are written otherwise than paths relative to the source."""

    def __init__(self, source: str, rows: Iterable[str]) -> None:
        parts = re.sub(r"^[\w+.-]+://", "", source).strip("/").split("/")
        self._ends_of_source = ["/".join(parts[first:]) for first in range(len(parts))]
        splits = map(self._split, rows)
        found = {beginning: num_parts for beginning, num_parts, is_absolute, _ in splits if is_absolute}
        most = max(found.values(), default=0)
        best = {beginning for beginning, num_parts in found.items() if num_parts == most > 0}
        whole = f"/{self._ends_of_source[0]}/"
        # Absolute paths of several folders that end as the source does: which of them is the source is not known.
        self._beginnings = {whole} if whole in best else best if len(best) == 1 else set()

    def _split(self, path: str) -> tuple[str, int, bool, str]:
        """Return the folders up to that of the source, how many of them agree, whether it is absolute, and the rest."""
        path = unquote(path) if path.startswith("file:") else path
        path = path.replace("\\", "/")
        is_absolute = re.match(r"/|[\w+.-]+:/", path) is not None
        path = "/" + re.sub(r"^[\w+.-]{2,}:/", "", path).lstrip("/")
        for end in filter(None, self._ends_of_source):
            before, found, rest = path.partition(f"/{end}/")
            if found and (is_absolute or not before):
                return before + found, end.count("/") + 1, is_absolute, rest
        return "", 0, is_absolute, path

    def relative(self, path: str) -> str:
        """Return a path with slashes and without scheme, drive, and the folders up to that of the source."""
        beginning, _, is_absolute, rest = self._split(path)
        is_source = not is_absolute or beginning in self._beginnings
        return composed((rest if is_source else beginning + rest).lstrip("/"))

    @staticmethod
    def loose(relative: str) -> str:
        """Return a relative path without what differs between systems and programs: case, and the extension."""
        return EXTENSION.sub("", composed(relative).casefold())

    def differences(self, row: str, path: str) -> str:
        """Return in what a row's path differs from the path of a file, for a message."""
        relative, path = self.relative(row), composed(path)
        stem, other_stem = EXTENSION.sub("", relative), EXTENSION.sub("", path)
        same_extension = relative[len(stem) :].lower() == path[len(other_stem) :].lower()
        same_name = stem.casefold() == other_stem.casefold()
        is_longer = stem.endswith(f"/{other_stem}") or other_stem.endswith(f"/{stem}")
        kinds = {
            "backslashes": "\\" in row,
            "the beginning": len(relative) < len(composed(row)) or is_longer,
            "upper and lower case": same_name and (stem != other_stem or (same_extension and relative != path)),
            "the extension": not same_extension,
            "the name": not (same_name or is_longer),
        }
        return ", ".join(kind for kind, differs in kinds.items() if differs)


def _unique(rows: Iterable[str], form: Callable[[str], str]) -> dict[str, str | None]:
    """Return the row of each form, None for a form of several rows."""
    found: dict[str, str | None] = {}
    for row in rows:
        key = form(row)
        found[key] = None if key in found else row
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
        self._like_splits: dict[str, str] = {}
        self.above: set[str] = set()
        """Names of the folders above the paths that were asked for."""
        if etl.labels.by == "file":
            assert etl.labels.file is not None, "the form refuses it"
            self._named = read_label_file(etl.labels.file, etl.split_by == "file", etl.split_group.column)
        elif etl.labels.by == "pattern":
            assert etl.labels.pattern is not None, "the form refuses it"
            self._pattern = _PatternLabels(etl.labels.pattern)
        self._num_rows, self._nearest = len(self._named), ""
        self.absent = set(self._named)
        """Paths of the label file that were not asked for."""
        self._row_of = as_known(self._named.keys())

    def of(self, paths: Sequence[str]) -> list[Named]:
        """Return label and predefined split of each path, which is relative to the source.

        Labels have the form of the source: `Comparison` gives them the form of the table.
        """
        # Once per folder, and the same for all its files.
        folders = [path[: path.rfind("/") + 1] for path in paths]
        of_folder = {folder: self._of_folder(folder) for folder in set(folders)}
        for folder in of_folder:
            self.above.update(folder.split("/"))
        if self._etl.labels.by == "folder":
            found = [of_folder[folder] for folder in folders]
        elif self._etl.labels.by == "file":
            rows = [self._row_of(path) for path in paths]
            self.absent.difference_update(rows)
            found = [self._named.get(row, (None, None))[:2] for row in rows]
        else:
            assert self._pattern is not None, "labels are by folder, file or pattern"
            found = [(self._pattern.of(path), None) for path in paths]
        if self._etl.split_by == "folder":
            found = [(label, of_folder[folder][1]) for (label, _), folder in zip(found, folders, strict=True)]
        self._found.update({label for label, _ in found})
        return found

    def _of_folder(self, folder: str) -> Named:
        if self._etl.split_by == "folder":
            return named_by_folders(folder, with_split=True)
        names = folder.split("/")[: -2 if self._etl.labels.by == "folder" else -1]  # without the label
        self._like_splits |= {name: LIKE_SPLITS[name.lower()] for name in names if name.lower() in LIKE_SPLITS}
        return named_by_folders(folder, with_split=False)

    def match_rest(self, paths: Iterator[str], source: str) -> bool:
        """Match files that have no row with rows that have no file, as far as one differs from one in notation alone.

        Backslashes, a scheme, a path that leads to the source, upper and lower case, and the extension are notation.

        Args:
            paths: The files without a label.
            source: Folder or URL.

        Returns:
            Whether `of` returns other labels than before.

        Raises:
            WrongInput: No path of the label file is in the source; the message names the nearest.
        """
        if (first := next(paths, None)) is None:
            return False
        notation = _Notation(source, self.absent)
        exactly = _unique(self.absent, notation.relative)
        loosely = _unique(self.absent, lambda row: notation.loose(notation.relative(row)))
        matched: dict[str, str] = {}
        candidates: dict[str, list[str]] = {}
        others: list[str] = []
        for path in chain([first], paths):
            if self._row_of(path) in self._named:
                continue  # Its row has no label.
            if row := exactly.get(composed(path)):
                matched[path] = row
            elif row := loosely.get(notation.loose(path)):
                candidates.setdefault(row, []).append(path)
            elif len(others) < NUM_COMPARED:
                others.append(path)
        taken = set(matched.values())
        for row, found in candidates.items():
            if len(found) == 1 and row not in taken:
                matched[found[0]] = row
            else:
                others += found
        self._named |= {path: self._named[row] for path, row in matched.items()}
        self.absent.difference_update(matched.values())
        if matched:
            path, row = min(matched.items())
            logger.warning(
                "%d of %d paths in %s differ from those in the source in %s, e.g. '%s', which is taken for '%s'",
                len(matched), self._num_rows, self._etl.labels.file, notation.differences(row, path), row, path,
            )  # fmt: skip
        missed = min(self.absent, default="")
        for path in difflib.get_close_matches(missed, others[:NUM_COMPARED], 1, 0) if missed else ():
            differences = notation.differences(missed, path)
            self._nearest = f"; the nearest without a label is '{path}', which differs in {differences}"
        if len(self.absent) == self._num_rows:
            raise _unusable(
                str(self._etl.labels.file),
                f"names no file of the source '{source}', e.g. '{min(self.absent)}'{self._nearest}",
                "give paths relative to the source",
            )
        return bool(matched)

    def groups(self) -> pa.Table:
        """Return the groups of the label file (GROUPS_ARROW), also those of files that the source has no more."""
        rows = {composed(path): row[2] for path, row in self._named.items() if len(row) > 2 and row[2]}
        return pa.Table.from_arrays([[*rows], [*rows.values()]], schema=GROUPS_ARROW)

    def warn(self) -> None:
        """Log warnings of paths that only the label file has, of folders like splits, and of labels that look alike."""
        if self.absent:
            logger.warning(
                "%d of %d paths in %s are not in the source, e.g. '%s'%s",
                len(self.absent), self._num_rows, self._etl.labels.file, min(self.absent), self._nearest,
            )  # fmt: skip
        splits = set(self._like_splits.values())
        if TRAIN in splits and len(splits) > 1 and self._etl.split_by in {"stratified", "content"}:
            logger.warning(
                "the folders %s look like splits, but etl.split_by is '%s': their images are mixed. To keep these "
                "splits, set etl.split_by to 'folder', which needs train, val (or valid) and test",
                shown(sorted(self._like_splits)), self._etl.split_by,
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
