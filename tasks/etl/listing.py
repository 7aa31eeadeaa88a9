"""What a source folder holds, before anything is read: local folders, and what every listing has in common."""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.labels import name_paths
from tasks.paths import is_inside
from tasks.schema import LISTING_ARROW, SPLITS

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png"})


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in EXTENSIONS


def is_image_path(path: str) -> bool:
    """Say whether a path below a source is listed: an image by its extension, and in no hidden folder."""
    return _is_image(path) and not any(_is_hidden(name) for name in path.split("/"))


def _walk(folder: str, root: str) -> Iterator[os.DirEntry[str]]:
    try:
        opened = os.scandir(folder)
    except PermissionError:
        raise WrongInput(f"source has the folder '{folder}', which cannot be read: change its permissions") from None
    with opened as entries:
        for entry in sorted(entries, key=lambda found: found.name):
            if _is_hidden(entry.name):
                continue
            if entry.is_symlink() and not is_inside(entry.path, root):
                # Links are followed inside the source only: what lies outside was not handed to us.
                continue
            if entry.is_dir():
                # A link to a folder above would walk in circles; its files are found at their own place.
                if not entry.is_symlink():
                    yield from _walk(entry.path, root)
            elif _is_image(entry.name):
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
    files: list[tuple[str, int, int]] = []
    for entry in _walk(str(source), root):
        try:
            status = entry.stat()
        except OSError:
            continue  # A broken link, or gone since the folder was read: as if never there.
        if not stat.S_ISREG(status.st_mode):
            continue
        # A name that is no UTF-8 is shown escaped; no file has the escaped name, so it ends as unreadable.
        path = os.fsencode(os.path.relpath(entry.path, source)).decode("utf-8", "backslashreplace")
        files.append((path, status.st_size, status.st_mtime_ns // 1000))
    return make_listing(files, str(source), etl)


def make_listing(files: Sequence[tuple[str, int, int]], source: str, etl: EtlConfig) -> pa.Table:
    """Return the listing of the files of a source.

    Args:
        files: Path below the source, size in bytes and time of the last change in microseconds since 1970 (UTC).
        source: Folder or URL that the sentence names.
        etl: What names labels and splits.

    Raises:
        WrongInput: There is no file, or the label file is not usable.
    """
    if not files:
        raise WrongInput(f"source is '{source}', which holds no {', '.join(sorted(EXTENSIONS))} file: check the path")
    paths, sizes, times = zip(*files, strict=True)
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
    """Refuse a folder that nothing can be trained on; return its listing.

    Raises:
        WrongInput: As `list_images` and `check_labels`.
    """
    listing = list_images(source, etl)
    check_labels(listing, str(source), etl)
    return listing


def check_labels(listing: pa.Table, source: str, etl: EtlConfig) -> None:
    """Refuse a listing that nothing can be trained on.

    Raises:
        WrongInput: Fewer than two labels, or predefined splits of which there is none.
    """
    labels = sorted(set(listing["label"].to_pylist()) - {None})
    if len(labels) < 2:
        thing = "class folder" if etl.labels.by == "folder" else f"label by etl.labels.{etl.labels.by}"
        named = f"only the {thing} '{labels[0]}'" if labels else f"no {thing}"
        things = "class folders" if etl.labels.by == "folder" else "labels"
        raise WrongInput(f"source is '{source}', which has {named}: a classifier needs at least two {things}")
    if etl.split_by == "folder" and listing["split"].null_count == listing.num_rows:
        raise WrongInput(
            f"etl.split_by is 'folder', but no path below '{source}' has a folder {', '.join(SPLITS)}: "
            "rename the folders, or set etl.split_by to 'stratified'"
        )


def check_splits(listing: pa.Table, etl: EtlConfig) -> None:
    """Refuse predefined splits that a training cannot use, before anything is ingested for it.

    Raises:
        WrongInput: One of the three splits has no file.
    """
    if etl.split_by in {"stratified", "content"}:
        return
    for split in SPLITS:
        if split not in listing["split"].to_pylist():
            raise WrongInput(
                f"etl.split_by is '{etl.split_by}', which puts no file into the split '{split}': training needs "
                f"{', '.join(SPLITS)}; put files into it, or set etl.split_by to 'stratified'"
            )
