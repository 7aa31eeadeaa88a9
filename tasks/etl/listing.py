"""Listing of the image files of a source without reading them: local folders, and checks of listings."""

import errno
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.config.etl import EtlConfig
from tasks.errors import SourceUnavailable, WrongInput
from tasks.etl.choice import SYSTEM_FILES, LeftOut, ListedFiles, content_of_head, has_image_name, is_system_file
from tasks.etl.labels import PathLabels
from tasks.etl.own_folders import NO_FOLDERS, SYSTEM_FOLDERS, OwnFolders
from tasks.paths import GONE, raise_unless_gone
from tasks.refs import SPLITS
from tasks.schema import LISTING_ARROW
from tasks.tables.parquet_rows import SpooledRows, spool_rows
from tasks.text.forms import composed

ARCHIVES = frozenset({".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar"})
"""Ends of the names of archives, which are unpacked before their images are listed."""

BATCH_FILES = 20_000
"""Number of files in memory as Python values while a source is listed; each takes 560 bytes."""


def _status(path: str, setting: str) -> os.stat_result | None:
    """Return the status of a path, None if it does not exist."""
    try:
        return os.stat(path)
    except OSError as error:
        raise_unless_gone(error, path, setting)
        return None


@dataclass(frozen=True)
class _Walk:
    """The folders of a source, one after the other.

    Attributes:
        source: The source.
        root: Its real path.
        setting: Name of its setting, for error messages.
        own: Folders to leave out.
        left: What the listing leaves out.
    """

    source: str
    root: str
    setting: str
    own: OwnFolders
    left: LeftOut

    def folders(self, folder: str) -> Iterator[tuple[str, list[str]]]:
        """Yield folders with the names of their files and of links to such, in the order of the paths."""
        # Names only: an entry takes 230 bytes, 840 with its status, and a name 70.
        names: list[str] = []
        folders: set[str] = set()
        links: set[str] = set()
        try:
            if folder != self.source and self.own.has_folder(self.root + folder[len(self.source) :]):
                self.left.num_systems += os.path.basename(folder) in SYSTEM_FOLDERS
                return
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    if name.startswith("."):
                        self.left.num_systems += 1
                    elif entry.is_file(follow_symlinks=False):
                        names.append(name)
                    elif entry.is_symlink():
                        # Links are followed only inside the source: the user gave no access to files outside it. A link
                        # to a parent folder would recurse without end; its files are listed at their own path.
                        links.add(name)
                        names.append(name)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.add(name)
                        names.append(name)
        except OSError as error:
            raise_unless_gone(error, folder, self.setting)
            return  # Deleted since its parent was read.
        if len(names) <= len(SYSTEM_FILES) and all(map(is_system_file, names)) and folder != self.source:
            self.left.empty.add(os.path.basename(folder))
        names.sort()
        files = names if not (folders or links) else []
        for name in names if folders or links else ():
            path = os.path.join(folder, name)
            if name in folders:
                yield folder, files
                files = []
                yield from self.folders(path)
            elif name not in links or self._leads_to_file(path):
                files.append(name)
        yield folder, files

    def _leads_to_file(self, link: str) -> bool:
        """Return whether a link leads to a file or special file of the source, not to a folder and not to nothing."""
        try:
            target = os.path.realpath(link, strict=True)
            is_inside = target.startswith(self.root + os.sep)
            if is_inside and self.own.has_target(target):
                return False
            if is_inside and not stat.S_ISDIR(os.stat(target).st_mode):
                return True
        except OSError as error:
            # The target up to the error, resolved. What lies behind a closed folder outside is outside, too.
            is_outside = error.filename is not None and not str(error.filename).startswith(self.root + os.sep)
            if error.errno in GONE:
                return False
            if not is_outside and (error.errno != errno.ENAMETOOLONG or has_image_name(link)):
                raise_unless_gone(error, link, self.setting)
        self.left.skip_link(link[len(self.source) + 1 :])
        return False


def local_files(
    source: Path,
    what: str = "class folders with images",
    setting: str = "source",
    own: OwnFolders = NO_FOLDERS,
    left: LeftOut | None = None,
) -> Iterator[ListedFiles]:
    """Yield the image files below a folder in batches, in the order of their paths; hidden files are left out.

    A file without the name of an image is one if its first bytes are those of an image.

    Args:
        source: The folder.
        what: What a user should give, for the error message.
        setting: Name of the setting of the folder, for the error message.
        own: Folders to leave out, since runs write to them.
        left: Gets the files that are left out.

    Raises:
        WrongInput: The folder is missing or not a folder, or this user may not look at a file or folder in it.
        SourceUnavailable: A file or folder cannot be looked at for another reason, or the folder was unmounted.
    """
    found = _status(str(source), setting)
    if found is None or not stat.S_ISDIR(found.st_mode):
        problem = "does not exist" if found is None else "is not a folder"
        archive = source.suffix.lower() in ARCHIVES
        raise WrongInput(
            f"{setting} is '{source}', which {'is an archive' if found and archive else problem}",
            setting=setting,
            way_out=f"{'unpack it, and ' if found and archive else ''}give a folder of {what}",
        )
    below = len(os.path.join(source, ""))
    files = ListedFiles()
    left = left or LeftOut()
    walk = _Walk(str(source), os.path.realpath(source), setting, own, left)
    for folder, names in walk.folders(str(source)):
        if not names:
            continue
        prefix = os.path.join(folder, "")[below:]
        try:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise_unless_gone(error, folder, setting)
            continue  # Deleted since it was read.
        try:
            for name in names:
                has_name = has_image_name(name)
                if not has_name and is_system_file(name):
                    left.num_systems += 1
                    continue
                try:
                    # The kernel looks up one name instead of the whole path.
                    status = os.stat(name, dir_fd=opened)
                except OSError as error:
                    raise_unless_gone(error, os.path.join(folder, name), setting)
                    continue  # Deleted since the folder was read.
                if not stat.S_ISREG(status.st_mode):
                    continue
                path = prefix + name
                if not path.isascii():
                    # A name that is not valid UTF-8 is escaped; no file has the escaped name, so that the file becomes
                    # unreadable.
                    path = os.fsencode(path).decode("utf-8", "backslashreplace")
                times = status.st_mtime_ns // 1000, status.st_ctime_ns // 1000
                if not has_name and (detail := content_of_head(name, opened)) is not None:
                    left.ignore(detail, path, status.st_size, *times, status.st_ino)
                    continue
                files.add(path, status.st_size, *times, status.st_ino)
                if len(files.paths) == BATCH_FILES:
                    yield files
                    files = ListedFiles()
        finally:
            os.close(opened)
    now = _status(str(source), setting)
    if now is None or not os.path.samestat(found, now):
        # Without this, all that was not listed would look deleted.
        raise SourceUnavailable(
            f"{setting} is '{source}', which was unmounted, moved or replaced while its files were listed",
            setting=setting,
            way_out="check the disk or network share, and run again",
        )
    yield files


def list_images(source: Path, etl: EtlConfig = EtlConfig(), own: OwnFolders = NO_FOLDERS) -> SpooledRows:
    """List the image files below `source` with their labels and predefined splits; hidden files are left out.

    Args:
        source: The folder.
        etl: Settings for labels and splits.
        own: As for `local_files`.

    Returns:
        Rows with the columns of LISTING_ARROW; label and split are null where a file has none.

    Raises:
        WrongInput: As `local_files`; or the folder has no image files, or the label file is not usable.
        SourceUnavailable: As `local_files`.
    """
    left = LeftOut()
    return make_listing(local_files(source, own=own, left=left), str(source), etl, left)


def make_listing(
    files: Iterable[ListedFiles], source: str, etl: EtlConfig, left: LeftOut, labels: PathLabels | None = None
) -> SpooledRows:
    """Return the listing of the files of a source, in a temporary file: ten million files are gigabytes in memory.

    Args:
        files: The files of the source, in batches.
        source: Folder or URL, for the error message.
        etl: Settings for labels and splits.
        left: Files that are left out, once `files` were listed; its folder of temporary files is used.
        labels: Labels and predefined splits; by default those of the settings.

    Raises:
        WrongInput: `files` is empty, or the label file is not usable.
    """
    labels = labels or PathLabels(etl)

    def labelled(paths: list[str], others: Iterable[Any]) -> pa.RecordBatch:
        named = labels.of(paths)
        columns = [paths, [label for label, _ in named], [split for _, split in named], *others]
        return pa.RecordBatch.from_pydict(dict(zip(LISTING_ARROW.names, columns, strict=True)), schema=LISTING_ARROW)

    def sampled(batch: ListedFiles) -> pa.RecordBatch:
        found = labelled(batch.paths, batch.columns()[1:])  # All of them: a label file may name any.
        if etl.sample_fraction < 1.0:
            found = found.filter(
                pa.array([is_in_sample(path, etl.sample_fraction) for path in batch.paths], pa.bool_())
            )
            left.num_outside += len(batch.paths) - found.num_rows
        return found

    listing = spool_rows(map(sampled, files), LISTING_ARROW, left.scratch)
    if left.num_outside and not listing.num_rows:
        raise WrongInput(
            f"etl.sample_fraction is {etl.sample_fraction:g}, which leaves none of the {left.num_outside} images of "
            f"'{source}'",
            setting="etl.sample_fraction",
            way_out="give a larger one",
        )
    check_not_empty(listing, source, left)
    if labels.absent and labels.match_rest(_unlabelled(listing), source):
        batches = (labelled(batch["path"].to_pylist(), batch.columns[3:]) for batch in listing.batches())
        listing = spool_rows(batches, LISTING_ARROW, left.scratch)
    labels.warn()
    left.warn_of_links(source, set())
    if etl.labels.by == "folder":
        left.warn_of_folders(source, labels.above)
    return listing


def is_in_sample(path: str, fraction: float) -> bool:
    """Return whether an image is in the sample, by a hash of its path: a larger sample has those of a smaller one."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) < fraction * 2**64


def _unlabelled(listing: SpooledRows) -> Iterator[str]:
    for batch in listing.batches(["path", "label"]):
        yield from batch.filter(pc.is_null(batch["label"]))["path"].to_pylist()


def check_not_empty(listing: SpooledRows, source: str, left: LeftOut, setting: str = "source") -> None:
    """Check that a listing has files.

    Raises:
        WrongInput: It has none; the message names the setting, and the kinds of its other files.
    """
    if not listing.num_rows:
        others = f": its {left.num_ignored} files are others ({left.ignored_kinds})" if left.num_ignored else ""
        links = f", and {left.num_links} links are not followed" if left.num_links else ""
        raise WrongInput(
            f"{setting} is '{source}', which holds no image{others}{links}", setting=setting, way_out="check the path"
        )


def check_source(source: Path, etl: EtlConfig = EtlConfig()) -> SpooledRows:
    """Check that a folder can be trained on; return its listing, as `list_images`.

    Raises:
        WrongInput: As `list_images` and `check_labels`.
        SourceUnavailable: As `list_images`.
    """
    listing = list_images(source, etl)
    check_labels(listing, str(source), etl)
    return listing


def class_sizes(listing: SpooledRows) -> Counter[str]:
    """Return the number of files of each class, whose name is in Unicode's composed form."""
    sizes: Counter[str] = Counter()
    for label, number in listing.counts("label").items():
        if label is not None:
            sizes[composed(label)] += number
    return sizes


def check_labels(listing: SpooledRows, source: str, etl: EtlConfig) -> None:
    """Check that a listing has at least two labels, and a split folder if the folders name the splits.

    Raises:
        WrongInput: There are fewer than two labels, or no path has a split folder.
    """
    labels = sorted(class_sizes(listing))
    if len(labels) < 2:
        thing = "class folder" if etl.labels.by == "folder" else f"label by etl.labels.{etl.labels.by}"
        named = f"only the {thing} '{labels[0]}'" if labels else f"no {thing}"
        things = "class folders" if etl.labels.by == "folder" else "labels"
        raise WrongInput(
            f"source is '{source}', which has {named}",
            setting="source",
            way_out=f"a classifier needs at least two {things}",
        )
    if etl.split_by == "folder" and [*listing.counts("split")] == [None]:
        raise WrongInput(
            f"etl.split_by is 'folder', but no path below '{source}' has a folder {', '.join(SPLITS)}",
            setting="etl.split_by",
            way_out="rename the folders, or set etl.split_by to 'stratified'",
        )


def check_splits(listing: SpooledRows, etl: EtlConfig) -> None:
    """Check that predefined splits can be used for training, before files are ingested.

    Raises:
        WrongInput: One of the three splits has no files.
    """
    if etl.split_by in {"stratified", "content"}:
        return
    found = listing.counts("split")
    for split in SPLITS:
        if split not in found:
            raise WrongInput(
                f"etl.split_by is '{etl.split_by}', which puts no file into the split '{split}'",
                setting="etl.split_by",
                way_out=f"training needs {', '.join(SPLITS)}; put files into it, or set etl.split_by to 'stratified'",
            )
