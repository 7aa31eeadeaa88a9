"""Listing of the image files of a source without reading them: local folders, and checks of listings."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.labels import PathLabels
from tasks.paths import is_inside
from tasks.schema import LISTING_ARROW, SPLITS
from tasks.tables.parquet_rows import SpooledRows, spool_rows

EXTENSIONS = (".jpg", ".jpeg", ".png")

BATCH_FILES = 20_000
"""Number of files in memory as Python values while a source is listed; each takes 480 bytes."""


@dataclass
class ListedFiles:
    """Files of a source, as columns: a tuple per file takes three times as long.

    Attributes:
        paths: Paths below the source.
        sizes: Sizes in bytes.
        times: Times of the last change in microseconds since 1970 (UTC).
    """

    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def is_image_path(path: str) -> bool:
    """Return whether a path below a source is listed: it has an image extension, and no part of it is hidden."""
    return _is_image(path) and not any(_is_hidden(name) for name in path.split("/"))


def _walk(folder: str, root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield folders with the names of their image files and of links to such, in the order of the paths."""
    try:
        opened = os.scandir(folder)
    except PermissionError:
        raise WrongInput(f"source has the folder '{folder}', which cannot be read: change its permissions") from None
    except FileNotFoundError:
        return  # Deleted since its parent was read: ignored.
    # Names only: an entry takes 230 bytes, 840 with its status, and a name 70.
    names: list[str] = []
    folders_and_links: set[str] = set()
    with opened as entries:
        for entry in entries:
            name = entry.name
            if _is_hidden(name):
                continue
            if entry.is_file(follow_symlinks=False):
                if _is_image(name):
                    names.append(name)
            elif entry.is_symlink() or entry.is_dir():
                folders_and_links.add(name)
                names.append(name)
    names.sort()
    files = names if not folders_and_links else []
    for name in names if folders_and_links else ():
        if name in folders_and_links:
            path = os.path.join(folder, name)
            is_link = os.path.islink(path)
            if is_link and not is_inside(path, root):
                # Links are followed only inside the source: the user gave no access to files outside it.
                continue
            if os.path.isdir(path):
                # A link to a parent folder would recurse without end; its files are listed at their own path.
                if not is_link:
                    yield folder, files
                    files = []
                    yield from _walk(path, root)
                continue
            if not _is_image(name):
                continue
        files.append(name)
    yield folder, files


def local_files(
    source: Path, what: str = "class folders with images", setting: str = "source"
) -> Iterator[ListedFiles]:
    """Yield the image files below a folder in batches, in the order of their paths; hidden files are ignored.

    Args:
        source: The folder.
        what: What a user should give, for the error message.
        setting: Name of the setting of the folder, for the error message.

    Raises:
        WrongInput: The folder is missing or not a folder, or a folder in it cannot be read.
    """
    if not source.is_dir():
        problem = "is not a folder" if source.exists() else "does not exist"
        raise WrongInput(f"{setting} is '{source}', which {problem}: give a folder of {what}")
    below = len(os.path.join(source, ""))
    files = ListedFiles()
    for folder, names in _walk(str(source), os.path.realpath(source)):
        if not names:
            continue
        prefix = os.path.join(folder, "")[below:]
        try:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            continue  # Deleted since it was read: ignored. Any other error must not make its files look deleted.
        try:
            for name in names:
                try:
                    # The kernel looks up one name instead of the whole path.
                    status = os.stat(name, dir_fd=opened)
                except OSError:
                    continue  # A broken link, or a file deleted since the folder was read: ignored.
                if not stat.S_ISREG(status.st_mode):
                    continue
                path = prefix + name
                if not path.isascii():
                    # A name that is not valid UTF-8 is escaped; no file has the escaped name, so that the file becomes
                    # unreadable.
                    path = os.fsencode(path).decode("utf-8", "backslashreplace")
                files.paths.append(path)
                files.sizes.append(status.st_size)
                files.times.append(status.st_mtime_ns // 1000)
                if len(files.paths) == BATCH_FILES:
                    yield files
                    files = ListedFiles()
        finally:
            os.close(opened)
    yield files


def list_images(source: Path, etl: EtlConfig = EtlConfig(), scratch: Path | None = None) -> SpooledRows:
    """List the image files below `source` with their labels and predefined splits; hidden files are ignored.

    Args:
        source: The folder.
        etl: Settings for labels and splits.
        scratch: As for `make_listing`.

    Returns:
        Rows with the columns of LISTING_ARROW; label and split are null where a file has none.

    Raises:
        WrongInput: The folder is missing, not a folder, or has no image files; or the label file is not usable.
    """
    return make_listing(local_files(source), str(source), etl, scratch)


def make_listing(files: Iterable[ListedFiles], source: str, etl: EtlConfig, scratch: Path | None = None) -> SpooledRows:
    """Return the listing of the files of a source, in a temporary file: ten million files are gigabytes in memory.

    Args:
        files: The files of the source, in batches.
        source: Folder or URL, for the error message.
        etl: Settings for labels and splits.
        scratch: Folder of the temporary file; None for the system's.

    Raises:
        WrongInput: `files` is empty, or the label file is not usable.
    """
    labels = PathLabels(etl)

    def labelled() -> Iterator[pa.RecordBatch]:
        for batch in files:
            named = labels.of(batch.paths)
            columns = [batch.paths, [label for label, _ in named], [split for _, split in named]]
            yield pa.RecordBatch.from_pydict(
                dict(zip(LISTING_ARROW.names, [*columns, batch.sizes, batch.times], strict=True)), schema=LISTING_ARROW
            )

    listing = spool_rows(labelled(), LISTING_ARROW, scratch)
    check_not_empty(listing, source)
    labels.warn_of_absent()
    return listing


def check_not_empty(listing: SpooledRows, source: str, setting: str = "source") -> None:
    """Check that a listing has files.

    Raises:
        WrongInput: It has none; the message names the setting and the extensions.
    """
    if not listing.num_rows:
        raise WrongInput(
            f"{setting} is '{source}', which holds no {', '.join(sorted(EXTENSIONS))} file: check the path"
        )


def check_source(source: Path, etl: EtlConfig = EtlConfig(), scratch: Path | None = None) -> SpooledRows:
    """Check that a folder can be trained on; return its listing, as `list_images`.

    Raises:
        WrongInput: As `list_images` and `check_labels`.
    """
    listing = list_images(source, etl, scratch)
    check_labels(listing, str(source), etl)
    return listing


def check_labels(listing: SpooledRows, source: str, etl: EtlConfig) -> None:
    """Check that a listing has at least two labels, and a split folder if the folders name the splits.

    Raises:
        WrongInput: There are fewer than two labels, or no path has a split folder.
    """
    labels = sorted(set(listing.values("label").to_pylist()) - {None})
    if len(labels) < 2:
        thing = "class folder" if etl.labels.by == "folder" else f"label by etl.labels.{etl.labels.by}"
        named = f"only the {thing} '{labels[0]}'" if labels else f"no {thing}"
        things = "class folders" if etl.labels.by == "folder" else "labels"
        raise WrongInput(f"source is '{source}', which has {named}: a classifier needs at least two {things}")
    if etl.split_by == "folder" and listing.values("split").to_pylist() == [None]:
        raise WrongInput(
            f"etl.split_by is 'folder', but no path below '{source}' has a folder {', '.join(SPLITS)}: "
            "rename the folders, or set etl.split_by to 'stratified'"
        )


def check_splits(listing: SpooledRows, etl: EtlConfig) -> None:
    """Check that predefined splits can be used for training, before files are ingested.

    Raises:
        WrongInput: One of the three splits has no files.
    """
    if etl.split_by in {"stratified", "content"}:
        return
    found = listing.values("split").to_pylist()
    for split in SPLITS:
        if split not in found:
            raise WrongInput(
                f"etl.split_by is '{etl.split_by}', which puts no file into the split '{split}': training needs "
                f"{', '.join(SPLITS)}; put files into it, or set etl.split_by to 'stratified'"
            )
