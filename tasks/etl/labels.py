"""Labels and predefined splits of paths, from folders, a regular expression, or a label file."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from tasks.config.etl import EtlConfig
from tasks.config.patterns import compile_pattern, find_group
from tasks.errors import WrongInput
from tasks.paths import expand_user, local_path
from tasks.schema import SPLITS
from tasks.system.remote_file import check_remote_file, check_resolved, is_url, open_http

logger = logging.getLogger("lakevision.etl")

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
    setting = f"etl.labels.file is '{file}'"
    wanted = ["path", "label", "split"] if with_split else ["path", "label"]
    table = _read_table(file, setting)
    lacking = [name for name in wanted if name not in table.column_names]
    if lacking:
        raise WrongInput(
            f"{setting}, which has the columns {', '.join(table.column_names)} and lacks {', '.join(lacking)}: "
            f"name its columns {', '.join(wanted)}"
        )
    try:
        columns = [table[name].cast(pa.string()).to_pylist() for name in wanted]
    except pa.ArrowException as error:
        raise WrongInput(
            f"{setting}, whose columns are not text ({error}): write {', '.join(wanted)} as text"
        ) from None
    named: dict[str, Named] = {}
    for path, label, *rest in zip(*columns, strict=True):
        split = rest[0] if rest else None
        if not path:
            raise WrongInput(f"{setting}, which has a row without a path (label '{label}'): remove it")
        if with_split and split not in SPLITS:
            raise WrongInput(f"{setting}, which gives '{path}' the split '{split}': use {', '.join(SPLITS)}")
        key = str(PurePosixPath(path))  # ./cat/1.jpg and cat/1.jpg are the same path
        if named.setdefault(key, (label or None, split)) != (label or None, split):
            raise WrongInput(f"{setting}, which has contradictory rows for '{key}': keep one of them")
    return named


def _open(file: str, path: Path | None) -> Any:
    if path is not None:
        return expand_user(path).open("rb")  # not with fsspec, which takes a name with :: for a chain of URLs
    return open_http(file) if file.lower().startswith("http") else fsspec.open(file, "rb")


def _read_table(file: str, setting: str) -> pa.Table:
    path = None if is_url(file) else local_path(file)
    if path is None:
        try:
            check_resolved(check_remote_file(file))
        except ValueError as error:
            raise WrongInput(f"etl.labels.file: {error}") from None
    try:
        with _open(file, path) as opened:
            if file.lower().endswith(".parquet"):
                return pyarrow.parquet.read_table(opened)
            # Read as text: class 007 differs from class 7, and NA and null are valid class names.
            names = ("path", "label", "split")
            options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            return pyarrow.csv.read_csv(opened, convert_options=options)
    except FileNotFoundError:
        raise WrongInput(f"{setting}, which does not exist: check the path") from None
    except Exception as error:  # Each file system and format raises its own exceptions.
        raise WrongInput(f"{setting}, which cannot be read ({error}): give a readable CSV or Parquet file") from error


def _label_rule(etl: EtlConfig) -> Callable[[str], str | None]:
    assert etl.labels.pattern is not None, "the form refuses it"
    pattern = compile_pattern(etl.labels.pattern)
    group = pattern.groupindex.get("label", 1)
    return lambda path: find_group(pattern, path, group) or None


class PathLabels:
    """Labels and predefined splits of paths according to the settings."""

    def __init__(self, etl: EtlConfig) -> None:
        """Read the label file, if there is one.

        Raises:
            WrongInput: As `read_label_file`.
        """
        self._etl = etl
        self._named: dict[str, Named] = {}
        if etl.labels.by == "file":
            assert etl.labels.file is not None, "the form refuses it"
            self._named = read_label_file(etl.labels.file, with_split=etl.split_by == "file")
        self._absent = set(self._named)

    def of(self, paths: Sequence[str]) -> list[Named]:
        """Return label and predefined split of each path, which is relative to the source."""
        by_folder = self._etl.split_by == "folder"
        if self._etl.labels.by == "file":
            self._absent.difference_update(paths)
            found = [self._named.get(path, (None, None)) for path in paths]
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
        rule = _label_rule(self._etl)
        return [(rule(path), split_from_folders(path) if by_folder else None) for path in paths]

    def warn_of_absent(self) -> None:
        """Log a warning if the label file has paths that none of the given paths is."""
        if self._absent:
            logger.warning(
                "%d of %d paths in %s are not in the source, e.g. '%s'",
                len(self._absent),
                len(self._named),
                self._etl.labels.file,
                min(self._absent),
            )
