"""The choice of the images of a source, by name or by their first bytes, and the files that a listing leaves out."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.errors import join_names, loggable
from tasks.etl.gates import NUM_NAMED
from tasks.model_package.structure import HEAD_BYTES, other_content
from tasks.schema import FILE_ARROW
from tasks.tables.parquet_rows import ParquetRows, SpooledRows, spool_rows

logger = logging.getLogger("lakevision.etl")

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".heic", ".heif", ".hif", ".tif", ".tiff", ".bmp", ".gif", ".avif"),
    *(".jfif", ".jpe", ".mpo", ".jp2", ".j2k", ".jpx", ".jpf", ".dib", ".apng", ".jxl"),
)
"""Ends of the names of images, in lower case; a file with another name is an image if its content is one."""

SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r"})
"""Names of files that systems make, in lower case; others that they make are hidden."""

UNFINISHED = (".part", ".partial", ".crdownload", ".download", ".filepart", ".tmp")
"""Ends of the names of files that a program still writes, which are ignored until they have their own name."""

MOST_LINKS, MOST_KINDS, LONGEST_KIND = 100, 100, 8
"""Links and kinds of ignored files that are kept by name, and the longest extension; the others are counted."""

GROUP_FILES = 100_000
"""Ignored files in memory, before they become a temporary file: ten million of them are a hundred files."""

IGNORED_ARROW = FILE_ARROW.append(pa.field("detail", pa.string()))
"""Columns of a file that is ignored; detail is the reason."""


def has_image_name(name: str) -> bool:
    """Return whether a file has the name of an image, which is listed without a look at its content."""
    return name.lower().endswith(EXTENSIONS)


def is_hidden(path: str) -> bool:
    """Return whether a path below a source is hidden, or one of its folders."""
    return path.startswith(".") or "/." in path


def is_system_file(name: str) -> bool:
    """Return whether systems make a file of this name, which is nobody's image."""
    return name.lower() in SYSTEM_FILES


def unfinished(name: str) -> str | None:
    """Return why a file is ignored for its name alone, or None."""
    return "the name of a file that is not complete" if name.lower().endswith(UNFINISHED) else None


def content_of_head(name: str, folder: int) -> str | None:
    """Return why a local file without the name of an image is none, or None if it is one, or cannot be read.

    A file that cannot be read is listed: it may be an image of the table.

    Args:
        name: Its name.
        folder: Descriptor of its folder.
    """
    if (detail := unfinished(name)) is not None:
        return detail
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
        try:
            return other_content(os.read(opened, HEAD_BYTES))
        finally:
            os.close(opened)
    except OSError:
        return None


@dataclass
class ListedFiles:
    """Files of a source, as columns: a tuple per file takes three times as long.

    Attributes:
        paths: Paths below the source.
        sizes: Sizes in bytes.
        times: Times of the last change in microseconds since 1970 (UTC).
        status_times: Times of the last change of the status (ctime), likewise; None on a store.
        inodes: Numbers of the inodes, unsigned; None on a store.
    """

    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    status_times: list[int | None] = field(default_factory=list)
    inodes: list[int | None] = field(default_factory=list)

    def add(self, path: str, size: int, time: int, status_time: int | None = None, inode: int | None = None) -> None:
        """Add a file."""
        self.paths.append(path)
        self.sizes.append(size)
        self.times.append(time)
        self.status_times.append(status_time)
        self.inodes.append(inode)

    def columns(self) -> list[Any]:
        """Return the columns of FILE_ARROW, in which the inode is a signed integer."""
        inodes = pa.array(self.inodes, pa.uint64()).view(pa.int64())
        return [self.paths, self.sizes, self.times, self.status_times, inodes]


Decided = dict[tuple[str, int, int], str]
"""Reasons of files of a store that were ignored before, by path, size and time of the last change (microseconds)."""


@dataclass
class LeftOut:
    """Files of a source that one listing leaves out.

    Attributes:
        scratch: Folder of temporary files; None for the system's.
        keeps_rows: Whether ignored files are kept for `rows`, or only counted.
        decided: Files of a store whose first bytes need not be read.
        num_ignored: Number of files with neither the name nor the content of an image.
        kinds: Their number by extension.
        folders: Names of the folders that they are in.
        num_systems: Number of hidden files, and of files that systems make; a folder of such files counts as one.
        num_outside: Number of images outside the sample.
        num_links: Number of links that are not followed, since they lead out of the source or to a folder.
        links: The first MOST_LINKS of them.
        empty: Names of folders of a local source with neither files nor folders.
    """

    scratch: Path | None = None
    keeps_rows: bool = True
    decided: Decided = field(default_factory=dict)
    num_ignored: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    folders: set[str] = field(default_factory=set)
    num_systems: int = 0
    num_outside: int = 0
    num_links: int = 0
    links: list[str] = field(default_factory=list)
    empty: set[str] = field(default_factory=set)
    _files: ListedFiles = field(default_factory=ListedFiles)
    _details: list[str] = field(default_factory=list)
    _spooled: list[SpooledRows] = field(default_factory=list)

    def ignore(self, detail: str, path: str, *values: Any) -> None:
        """Add a file to ignore: the reason, its path, and its other values as for `ListedFiles.add`."""
        folder, _, name = path.rpartition("/")
        self.num_ignored += 1
        kind = os.path.splitext(name)[1].lower() or "without an extension"
        is_kept = len(kind) <= LONGEST_KIND or kind == "without an extension"
        self.kinds[kind if is_kept and (kind in self.kinds or len(self.kinds) < MOST_KINDS) else "others"] += 1
        self.folders.add(folder.rpartition("/")[2])
        if not self.keeps_rows:
            return
        self._files.add(path, *values)
        self._details.append(detail)
        if len(self._details) == GROUP_FILES:
            self._spool()

    def skip_link(self, path: str) -> None:
        """Count a link that is not followed."""
        self.num_links += 1
        if len(self.links) < MOST_LINKS:
            self.links.append(path)

    def _spool(self) -> None:
        rows = pa.RecordBatch.from_arrays([*self._files.columns(), self._details], schema=IGNORED_ARROW)
        self._spooled.append(spool_rows([rows], IGNORED_ARROW, self.scratch))
        self._files, self._details = ListedFiles(), []

    def rows(self) -> ParquetRows:
        """Return the ignored files (IGNORED_ARROW); their temporary files last as long as this object."""
        if self._details:
            self._spool()
        return ParquetRows(tuple(file for rows in self._spooled for file in rows.files), IGNORED_ARROW)

    @property
    def ignored_kinds(self) -> str:
        """Number of ignored files of the most frequent extensions, as text."""
        named = [f"{number} {loggable(kind)}" for kind, number in self.kinds.most_common(NUM_NAMED)]
        return join_names(named, len(self.kinds))

    @property
    def parts(self) -> str:
        """The numbers of ignored files, of those that systems left, and of images outside the sample: a sum's end."""
        kinds = f" ({self.ignored_kinds})" if self.num_ignored else ""
        sample = f" + {self.num_outside} outside the sample" if self.num_outside else ""
        return f"{self.num_ignored} ignored{kinds} + {self.num_systems} left by systems{sample}"

    def warn_of_links(self, source: str, said: set[str]) -> None:
        """Log the links that are not followed, but for those that were said before."""
        new = [link for link in self.links if link not in said]
        if not new:
            return
        said.update(new)
        logger.warning(
            "%d links in '%s' are not followed, since they lead out of it or to a folder: %s; put the files there",
            self.num_links, source, _named(new, self.num_links),
        )  # fmt: skip

    def warn_of_folders(self, source: str, with_images: AbstractSet[str]) -> None:
        """Log the folders without an image; `with_images` has the names of all folders above images."""
        without = sorted((self.folders | self.empty) - {"", *with_images})
        if without:
            logger.warning(
                "%d class folders in '%s' have no image: %s", len(without), source, _named(without, len(without))
            )


def _named(names: Sequence[str], number: int) -> str:
    return join_names([f"'{loggable(name)}'" for name in names[:NUM_NAMED]], number)
