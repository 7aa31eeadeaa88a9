"""Folders that are never part of a source: those that runs write to, and system folders such as a recycle bin.

With a home inside the source, the second run would take the figures of the first for images of a class `artifacts`.
"""

import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tasks.errors import WrongInput
from tasks.etl.choice import Decided
from tasks.paths import local_path, raise_unless_gone
from tasks.storage import Storage, artifacts_folder
from tasks.system.home import KNOWN_ENTRIES

logger = logging.getLogger("lakevision.etl")

TABLES = (
    "images",
    "files",
    "predictions",
    "inputs",
    "promotions",
    "requests",
    "feedback",
    "request_images",
    "suspects",
)
"""Names of the tables, which may be beside the class folders of a source."""

SYSTEM_FOLDERS = (
    *("@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot"),  # Synology, QNAP
    *("$RECYCLE.BIN", "$Recycle.Bin", "System Volume Information", "lost+found", "__MACOSX"),
)
"""Names of folders with thumbnails and deleted files, which devices and operating systems make."""

_SYSTEM_FOLDER = re.compile(rf"(?<![^/])({'|'.join(map(re.escape, SYSTEM_FOLDERS))})/")


S3_SCHEMES = ("s3", "s3n", "s3a")
"""Schemes of the same store: MLflow and Hadoop name it differently."""


def _normalized(url: str) -> str:
    """Return a folder without symbolic links, or a URL in a form in which two names of one location are equal."""
    folder = local_path(url)
    if folder is not None:
        return os.path.realpath(folder)
    scheme, _, rest = url.partition("://")  # The rest is taken literally, also a question mark.
    return f"{'s3a' if scheme.lower() in S3_SCHEMES else scheme.lower()}://{rest}".rstrip("/")


@dataclass(frozen=True)
class OwnFolders:
    """Locations below a source that runs write to, so that its listing leaves them out.

    Attributes:
        source: The source, normalized.
        setting: Name of its setting.
        locations: Real paths or normalized URLs; those of a local source may also be elsewhere.
        identities: Device and inode of the local folders, by which a bind mount is recognized.
        said: Locations and names of system folders that were logged: once, and not for each listing of a stream.
        decided: Files of a store whose first bytes need not be read again by the next listing of a stream.
    """

    source: str
    setting: str
    locations: frozenset[str]
    identities: frozenset[tuple[int, int]]
    said: set[str] = field(default_factory=set)
    decided: Decided = field(default_factory=dict)

    @classmethod
    def of(cls, source: Path | str, storage: Storage, setting: str = "source", predictions: str | None = None) -> Self:
        """Return the folders to leave out of a source.

        A folder that contains the source is not left out, but its entries are, as far as runs make them. So a home may
        have a source in it, and tables may be beside class folders.

        Args:
            source: Folder or URL.
            storage: The storage of the run.
            setting: Name of the setting of the source.
            predictions: Path or URL of the table of predictions, if it is not in `storage`.

        Raises:
            WrongInput: The source is a folder of artifacts, or this user may not look at one of the folders.
            SourceUnavailable: One of the folders cannot be looked at for another reason.
        """
        root = _normalized(str(source))
        own_artifacts = _normalized(artifacts_folder(storage.home))
        if root == _normalized(storage.artifacts) or f"{root}/".startswith(f"{own_artifacts}/"):
            raise WrongInput(
                f"{setting} is '{source}', which has the artifacts of training runs",
                setting=setting,
                way_out="give a folder of images, or another storage.artifacts",
            )
        folders = [storage.home, storage.tables, storage.cache, storage.artifacts]
        folders += [f"{storage.home}/{name}" for name in sorted(KNOWN_ENTRIES)]
        folders += map(storage.table, TABLES)
        if predictions is not None:
            beside = predictions.rstrip("/").rpartition("/")[0]
            folders += [predictions, f"{beside}/inputs", f"{predictions.rstrip('/')}.streams"]
        # A source in a home, or tables around a source: it is not left out of itself.
        apart = {found for found in map(_normalized, folders) if not f"{root}/".startswith(f"{found}/")}
        identities = set()
        for found in apart:
            if local_path(found) is not None:
                try:
                    status = os.stat(found)
                except OSError as error:
                    raise_unless_gone(error, found, "storage")
                    continue  # It has nothing that could be listed.
                identities.add((status.st_dev, status.st_ino))
        return cls(root, setting, frozenset(apart), frozenset(identities))

    def has_folder(self, folder: str) -> bool:
        """Return whether a local folder below the source is left out; the log says so once.

        Args:
            folder: Path of the folder without symbolic links below the source.

        Raises:
            OSError: The folder cannot be looked at.
        """
        if self._is_system(f"/{os.path.basename(folder)}/", folder):
            return True
        if folder not in self.locations:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) not in self.identities:
                return False
        self._say(folder)
        return True

    def has_target(self, file: str) -> bool:
        """Return whether the target of a link, a real path, is in a folder that is left out."""
        return any(file.startswith(f"{found}/") for found in self.locations) or self._is_system(
            file.removeprefix(self.source), file
        )

    def prefixes(self) -> tuple[str, ...]:
        """Return the folders to leave out of the listing of a URL, relative to it, each with a slash at its end."""
        begin = f"{self.source}/"
        return tuple(f"{found[len(begin) :]}/" for found in sorted(self.locations) if found.startswith(begin))

    def has_path(self, path: str, prefixes: tuple[str, ...]) -> bool:
        """Return whether a file of a URL is left out; the log names its folder once.

        Args:
            path: Path relative to the URL.
            prefixes: As from `prefixes`.
        """
        if self._is_system(path):
            return True
        if not path.startswith(prefixes):
            return False
        prefix = next(found for found in prefixes if path.startswith(found))
        self._say(f"{self.source}/{prefix.rstrip('/')}")
        return True

    def _is_system(self, path: str, shown: str = "") -> bool:
        found = _SYSTEM_FOLDER.search(path)
        if found is None:
            return False
        if found[1] not in self.said:
            self.said.add(found[1])
            logger.info(
                "'%s' is left out, like each folder of this name: devices and operating systems make them",
                shown or path[: found.end() - 1],
            )
        return True

    def _say(self, folder: str) -> None:
        if folder not in self.said:
            self.said.add(folder)
            logger.info("'%s' is left out of %s '%s': runs write to it", folder, self.setting, self.source)


NO_FOLDERS = OwnFolders("", "", frozenset(), frozenset())
"""Nothing but system folders to leave out: of a folder that no run writes to."""
