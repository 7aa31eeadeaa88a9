"""The disks that a run writes to: refused early where nothing can be written, and one sentence where they are full."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import DiskFull, WrongInput
from tasks.paths import local_path

NO_SPACE = ("No space left on device", "Disk quota exceeded")
"""What the system calls it, whoever hands it on: a Python worker, the JVM, Delta."""


def existing_folder(url: str) -> Path | None:
    """Return the folder, or the nearest one above it that is there; None for an object store."""
    folder = local_path(url)
    if folder is None:
        return None
    while not folder.exists():
        folder = folder.parent
    return folder


def check_writable(url: str, setting: str) -> None:
    """Refuse a place where nothing can be written, by writing there.

    Raises:
        WrongInput: Names the setting, the place and the system's reason.
    """
    try:
        folder = existing_folder(url)
        if folder is not None:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise WrongInput(
            f"{setting} is '{url}', where nothing can be written ({error.strerror}): mend that, or give another folder"
        ) from None


@contextmanager
def translate_disk_full(*urls: str) -> Iterator[None]:
    """Turn what a full disk makes of Spark and Python into one sentence.

    Args:
        urls: The places that the work inside writes to.

    Raises:
        DiskFull: Says how much is free at each place.
    """
    try:
        yield
    except Exception as error:
        if not any(said in str(error) for said in NO_SPACE):
            raise
        folders = {url: existing_folder(url) for url in urls}
        free = ", ".join(
            f"'{url}' has {shutil.disk_usage(folder).free / 1e6:.1f} MB free"
            for url, folder in folders.items()
            if folder is not None
        )
        raise DiskFull(f"a disk was full while it was written to ({free}): make room there, then run again") from error
