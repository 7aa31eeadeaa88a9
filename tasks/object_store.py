"""Access to folders and stores from Python, by fsspec: listings are not cached, and stores are checked before work."""

import logging
import os
from functools import cache
from typing import Any
from uuid import uuid4

import fsspec

from tasks.errors import WrongInput
from tasks.paths import local_path

logger = logging.getLogger("lakevision.store")

PROBE = ".lakevision-probe-"
"""Prefix of the names of the empty files and objects that check a folder or store, each of which is removed at once."""

S3_ACCESS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, and the permissions"


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a folder or URL, and the path in it.

    The credentials of a store come from the environment. Its listings are not cached: what another run committed
    after the first listing would stay invisible for as long as this process lives.

    Raises:
        WrongInput: The Python package of the store is not installed, or the URL has `::`.
    """
    if (folder := local_path(url)) is not None:
        return fsspec.filesystem("file"), os.path.abspath(folder)
    if "::" in url:  # fsspec would take it for a chain of file systems, and use another folder.
        raise WrongInput(f"'{url}' has two colons in a row", way_out="give a folder without them")
    try:
        return fsspec.core.url_to_fs(url, use_listings_cache=False)  # type: ignore[no-any-return]  # fsspec has no types
    except (ImportError, ValueError) as error:
        raise WrongInput(
            f"'{url}' cannot be read by Python ({error})", way_out="install the package of its store"
        ) from None


def list_names(url: str) -> list[str]:
    """Return the names of the files and folders in a folder; an empty list if it does not exist.

    A store has no folders: one without objects does not exist there.
    """
    filesystem, root = file_system(url)
    try:
        return [found.rstrip("/").rsplit("/", 1)[-1] for found in filesystem.ls(root, detail=False)]
    except FileNotFoundError:
        return []


def check_store(url: str, setting: str) -> None:
    """Check that objects can be written to a URL, by writing an empty one there.

    Raises:
        WrongInput: They cannot; the message names the setting, the URL and the reason.
    """
    if url.startswith("s3://"):
        raise WrongInput(
            f"{setting} is '{url}', and Hadoop's name for this store is s3a",
            setting=setting,
            way_out=f"write s3a://{url[5:]}",
        )
    filesystem, root = file_system(url)
    probe = f"{root.rstrip('/')}/{PROBE}{uuid4().hex}"
    try:
        filesystem.pipe_file(probe, b"")
        filesystem.rm_file(probe)
    except Exception as error:  # Each store's package has its own exceptions.
        logger.debug("%s is not writable", url, exc_info=error)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise WrongInput(
            f"{setting} is '{url}', where nothing can be written ({reason})", setting=setting, way_out=S3_ACCESS
        ) from None


@cache
def has_conditional_puts(url: str) -> bool:
    """Return whether the S3 server of a URL refuses to replace an object that was put with `If-None-Match: *`.

    A server that does not know the header ignores it. It is tried once per process and folder, with an empty object.
    """
    filesystem, root = file_system(url.rstrip("/"))
    probe = f"{root}/{PROBE}{uuid4().hex}"
    filesystem.pipe_file(probe, b"", mode="create")
    try:
        filesystem.pipe_file(probe, b"", mode="create")
    except OSError as error:  # s3fs has no class of its own for it.
        response = getattr(error.__cause__, "response", {})
        if response.get("Error", {}).get("Code") != "PreconditionFailed":
            raise
        return True
    finally:
        filesystem.rm_file(probe)
    return False
