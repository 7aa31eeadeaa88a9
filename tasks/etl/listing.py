"""What a source folder holds, before anything is read."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tasks.config import BUILTIN_DIGITS, EtlConfig
from tasks.errors import WrongInput
from tasks.etl.digits import write_digits
from tasks.etl.labels import name_paths
from tasks.schema import LISTING_ARROW, SPLITS
from tasks.storage import Storage, local_path

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png"})


def source_folder(source: str, storage: Storage) -> Path:
    """Return the folder a source names; the built-in digits lie under the run's home.

    Raises:
        WrongInput: The source is a URL of a file system that ETL does not read.
    """
    if source == BUILTIN_DIGITS:
        return Path(storage.home) / "digits"
    path = local_path(source)
    if path is None:
        raise WrongInput(f"source is '{source}', which is no local folder: give a path or a file:// URL")
    return path.expanduser().absolute()


def _walk(folder: str, root: str) -> Iterator[os.DirEntry[str]]:
    try:
        opened = os.scandir(folder)
    except PermissionError:
        raise WrongInput(f"source has the folder '{folder}', which cannot be read: change its permissions") from None
    with opened as entries:
        for entry in sorted(entries, key=lambda found: found.name):
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not os.path.realpath(entry.path).startswith(root + os.sep):
                # Links are followed inside the source only: what lies outside was not handed to us.
                continue
            if entry.is_dir():
                # A link to a folder above would walk in circles; its files are found at their own place.
                if not entry.is_symlink():
                    yield from _walk(entry.path, root)
            elif Path(entry.name).suffix.lower() in EXTENSIONS:
                yield entry


def list_images(source: Path, etl: EtlConfig = EtlConfig()) -> pa.Table:
    """List the image files below `source`, hidden ones left out, with their label and predefined split.

    Returns:
        Table with the columns of LISTING_ARROW, ordered by path; label and split are null where nothing names them.

    Raises:
        WrongInput: The folder is missing, not a folder, or holds no image file; or the label file is not usable.
    """
    if not source.is_dir():
        what = "is not a folder" if source.exists() else "does not exist"
        raise WrongInput(f"source is '{source}', which {what}: give a folder of class folders with images")
    root = os.path.realpath(source)
    paths: list[str] = []
    sizes: list[int] = []
    times: list[int] = []
    for entry in _walk(str(source), root):
        try:
            status = entry.stat()
        except OSError:
            continue  # A broken link, or gone since the folder was read: as if never there.
        if not stat.S_ISREG(status.st_mode):
            continue
        # A name that is no UTF-8 is shown escaped; no file has the escaped name, so it ends as unreadable.
        paths.append(os.fsencode(os.path.relpath(entry.path, source)).decode("utf-8", "backslashreplace"))
        sizes.append(status.st_size)
        times.append(status.st_mtime_ns // 1000)
    if not paths:
        raise WrongInput(f"source is '{source}', which holds no {', '.join(sorted(EXTENSIONS))} file: check the path")
    named = name_paths(paths, etl)
    columns = {
        "path": paths,
        "label": [label for label, _ in named],
        "split": [split for _, split in named],
        "size": sizes,
        "modified_at": times,
    }
    return pa.table(columns, schema=LISTING_ARROW)


def check_source(source: Path, etl: EtlConfig = EtlConfig()) -> pa.Table:
    """Refuse a source that nothing can be trained on; return its listing.

    Raises:
        WrongInput: As `list_images`, fewer than two labels, or predefined splits of which there is none.
    """
    listing = list_images(source, etl)
    labels = sorted(set(listing["label"].to_pylist()) - {None})
    if len(labels) < 2:
        thing = "class folder" if etl.labels.by == "folder" else f"label by etl.labels.{etl.labels.by}"
        named = f"only the {thing} '{labels[0]}'" if labels else f"no {thing}"
        things = "class folders" if etl.labels.by == "folder" else "labels"
        raise WrongInput(f"source is '{source}', which has {named}: a classifier needs at least two {things}")
    if etl.split_by == "folder" and listing["split"].null_count == listing.num_rows:
        raise WrongInput(
            f"etl.split_by is 'folder', but no path below '{source}' has a folder {', '.join(SPLITS)}: "
            "rename the folders, or set etl.split_by to 'content'"
        )
    return listing


def check_splits(listing: pa.Table, etl: EtlConfig) -> None:
    """Refuse predefined splits that a training cannot use, before anything is ingested for it.

    Raises:
        WrongInput: One of the three splits has no file.
    """
    if etl.split_by == "content":
        return
    for split in SPLITS:
        if split not in listing["split"].to_pylist():
            raise WrongInput(
                f"etl.split_by is '{etl.split_by}', which puts no file into the split '{split}': training needs "
                f"{', '.join(SPLITS)}; put files into it, or set etl.split_by to 'content'"
            )


@dataclass(frozen=True)
class Source:
    """A folder and what it held when it was listed (LISTING_ARROW)."""

    folder: Path
    listing: pa.Table


def prepare_source(etl: EtlConfig, storage: Storage) -> Source:
    """List the source, with the built-in digits written out where they are asked for.

    Raises:
        WrongInput: As `check_source`.
    """
    folder = source_folder(etl.source, storage)
    if etl.source == BUILTIN_DIGITS:
        write_digits(folder)
    return Source(folder, check_source(folder, etl))
