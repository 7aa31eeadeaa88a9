"""What a source folder holds, before anything is read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tasks.config import BUILTIN_DIGITS
from tasks.errors import WrongInput
from tasks.schema import LISTING_ARROW
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


def list_images(source: Path) -> pa.Table:
    """List the image files below `source`, hidden ones left out, with the parent folder as label.

    Returns:
        Table with the columns of LISTING_ARROW, ordered by path; label is null for a file at the top.

    Raises:
        WrongInput: The folder is missing, not a folder, or holds no image file.
    """
    if not source.is_dir():
        what = "is not a folder" if source.exists() else "does not exist"
        raise WrongInput(f"source is '{source}', which {what}: give a folder of class folders with images")
    root = os.path.realpath(source)
    columns: dict[str, list[object]] = {name: [] for name in LISTING_ARROW.names}
    for entry in _walk(str(source), root):
        try:
            status = entry.stat()
        except OSError:
            continue  # A broken link, or gone since the folder was read: as if never there.
        if not stat.S_ISREG(status.st_mode):
            continue
        # A name that is no UTF-8 is shown escaped; no file has the escaped name, so it ends as unreadable.
        relative = os.fsencode(os.path.relpath(entry.path, source)).decode("utf-8", "backslashreplace")
        columns["path"].append(relative)
        columns["label"].append(os.path.basename(os.path.dirname(relative)) or None)
        columns["size"].append(status.st_size)
        columns["modified_at"].append(status.st_mtime_ns // 1000)
    if not columns["path"]:
        raise WrongInput(f"source is '{source}', which holds no {', '.join(sorted(EXTENSIONS))} file: check the path")
    return pa.table(columns, schema=LISTING_ARROW)


def check_source(source: Path) -> int:
    """Refuse a source that nothing can be trained on; return how many image files it holds.

    Raises:
        WrongInput: As `list_images`, or fewer than two class folders.
    """
    listing = list_images(source)
    labels = sorted(set(listing["label"].to_pylist()) - {None})
    if len(labels) < 2:
        named = f"only the class folder '{labels[0]}'" if labels else "no class folder"
        raise WrongInput(f"source is '{source}', which has {named}: a classifier needs at least two class folders")
    num_files: int = listing.num_rows
    return num_files
