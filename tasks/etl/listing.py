"""Listing of the image files of a source without reading them: local folders, and checks of listings."""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.labels import label_paths
from tasks.paths import is_inside
from tasks.schema import LISTING_ARROW, SPLITS

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png"})


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in EXTENSIONS


def is_image_path(path: str) -> bool:
    """Return whether a path below a source is listed: it has an image extension, and no part of it is hidden."""
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
                # Links are followed only inside the source: the user gave no access to files outside it.
                continue
            if entry.is_dir():
                # A link to a parent folder would recurse without end; its files are listed at their own path.
                if not entry.is_symlink():
                    yield from _walk(entry.path, root)
            elif _is_image(entry.name):
                yield entry


def list_images(source: Path, etl: EtlConfig = EtlConfig()) -> pa.Table:
    """List the image files below `source` with their labels and predefined splits; hidden files are ignored.

    Returns:
        Table with the columns of LISTING_ARROW, ordered by path; label and split are null where a file has none.

    Raises:
        WrongInput: The folder is missing, not a folder, or has no image files; or the label file is not usable.
    """
    if not source.is_dir():
        problem = "is not a folder" if source.exists() else "does not exist"
        raise WrongInput(f"source is '{source}', which {problem}: give a folder of class folders with images")
    root = os.path.realpath(source)
    files: list[tuple[str, int, int]] = []
    for entry in _walk(str(source), root):
        try:
            status = entry.stat()
        except OSError:
            continue  # A broken link, or a file deleted since the folder was read: ignored.
        if not stat.S_ISREG(status.st_mode):
            continue
        # A name that is not valid UTF-8 is escaped; no file has the escaped name, so the file becomes unreadable.
        path = os.fsencode(os.path.relpath(entry.path, source)).decode("utf-8", "backslashreplace")
        files.append((path, status.st_size, status.st_mtime_ns // 1000))
    return make_listing(files, str(source), etl)


def make_listing(files: Sequence[tuple[str, int, int]], source: str, etl: EtlConfig) -> pa.Table:
    """Return the listing of the files of a source.

    Args:
        files: Path below the source, size in bytes and time of the last change in microseconds since 1970 (UTC).
        source: Folder or URL, for the error message.
        etl: Settings for labels and splits.

    Raises:
        WrongInput: `files` is empty, or the label file is not usable.
    """
    if not files:
        raise WrongInput(f"source is '{source}', which holds no {', '.join(sorted(EXTENSIONS))} file: check the path")
    paths, sizes, times = zip(*files, strict=True)
    named = label_paths(paths, etl)
    columns = {
        "path": paths,
        "label": [label for label, _ in named],
        "split": [split for _, split in named],
        "size": sizes,
        "modified_at": times,
    }
    return pa.table(columns, schema=LISTING_ARROW)


def check_source(source: Path, etl: EtlConfig = EtlConfig()) -> pa.Table:
    """Check that a folder can be trained on; return its listing.

    Raises:
        WrongInput: As `list_images` and `check_labels`.
    """
    listing = list_images(source, etl)
    check_labels(listing, str(source), etl)
    return listing


def check_labels(listing: pa.Table, source: str, etl: EtlConfig) -> None:
    """Check that a listing has at least two labels, and a split folder if the folders name the splits.

    Raises:
        WrongInput: There are fewer than two labels, or no path has a split folder.
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
    """Check that predefined splits can be used for training, before files are ingested.

    Raises:
        WrongInput: One of the three splits has no files.
    """
    if etl.split_by in {"stratified", "content"}:
        return
    for split in SPLITS:
        if split not in listing["split"].to_pylist():
            raise WrongInput(
                f"etl.split_by is '{etl.split_by}', which puts no file into the split '{split}': training needs "
                f"{', '.join(SPLITS)}; put files into it, or set etl.split_by to 'stratified'"
            )
