"""Checks of the disks that a run writes to: write access, and errors of full disks."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import DiskFull, WrongInput
from tasks.object_store import check_store
from tasks.paths import local_path
from tasks.text.markup import text_of

NO_SPACE = ("No space left on device", "Disk quota exceeded")
"""The operating system's messages for a full disk, whether a Python worker, the JVM or Delta reports them."""


def existing_folder(url: str) -> Path | None:
    """Return a folder, or its nearest existing parent; None for an object store."""
    folder = local_path(url)
    if folder is None:
        return None
    while not folder.exists():
        folder = folder.parent
    return folder


def check_writable(url: str, setting: str) -> None:
    """Check that a location is writable, by writing a temporary file or an empty object there.

    Raises:
        WrongInput: It is not; the message names the setting, the location and the reason.
    """
    folder = existing_folder(url)
    if folder is None:
        check_store(url, setting)
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise WrongInput(
            f"{setting} is '{url}', where nothing can be written ({error.strerror})",
            setting=setting,
            way_out="fix that, or give another folder",
        ) from None


@contextmanager
def translate_disk_full(*urls: str) -> Iterator[None]:
    """Translate the errors of Spark and Python on a full disk into `DiskFull`.

    Args:
        urls: Locations that the block writes to.

    Raises:
        DiskFull: A disk is full; the message states the free space of each location.
    """
    try:
        yield
    except Exception as error:
        text = text_of(error)
        if not any(message in text for message in NO_SPACE):
            raise
        folders = {url: existing_folder(url) for url in urls}
        free = ", ".join(
            f"'{url}' has {shutil.disk_usage(folder).free / 1e6:.1f} MB free"
            for url, folder in folders.items()
            if folder is not None
        )
        way_out = "make room there, then run again"
        raise DiskFull(f"a disk was full while it was written to ({free})", way_out=way_out) from error
