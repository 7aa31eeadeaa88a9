"""Local paths of folders and file:// URLs, and errors of their reading."""

import errno
import os
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlparse

from tasks.errors import SourceUnavailable, WrongInput

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of a path that nothing is at. After any other, such as that of a lost mount, its file may still be there."""


def local_path(url: str) -> Path | None:
    """Return the local path of a folder or file:// URL, or None for an object store.

    Raises:
        WrongInput: A file:// URL names another machine, for example because a slash is missing.
    """
    if urlparse(url).scheme != "file":
        return None if urlparse(url).scheme else Path(url)
    # Not urlparse's path: a question mark or number sign is part of a folder's name here.
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in {"", "localhost"}:
            raise WrongInput(
                f"'{url}' names a folder of the machine '{host}'", way_out=f"write file:///{host}{slash}{path}"
            )
        rest = slash + path
    return Path(os.fsdecode(unquote_to_bytes(rest)))


def resolved(url: str) -> str:
    """Return a folder with its symbolic links resolved, or its URL, so that two names of one location are equal.

    Raises:
        WrongInput: As `local_path`.
    """
    folder = local_path(url)
    return url.rstrip("/") if folder is None else os.path.realpath(folder)


def is_inside(path: str, root: str) -> bool:
    """Return whether a path, with its symbolic links resolved, is below `root`, which has none."""
    return os.path.realpath(path).startswith(root + os.sep)


def raise_unless_gone(error: OSError, path: str, setting: str = "source") -> None:
    """Return if an error means that a file or folder does not exist, raise it for users if it may.

    Raises:
        WrongInput: This user has no permission to look at it.
        SourceUnavailable: Any other error, such as that of a network share that does not answer.
    """
    if error.errno in GONE:
        return
    problem = f"{setting} has '{path}', which cannot be read ({error.strerror or error})"
    if isinstance(error, PermissionError):
        raise WrongInput(
            problem, setting=setting, way_out="change its permissions; its files do not count as deleted"
        ) from None
    raise SourceUnavailable(
        problem, setting=setting, way_out="check the disk or network share; its files do not count as deleted"
    ) from error


def absolute_url(url: str) -> str:
    """Return the absolute path of a folder, without `file://` and `~`, or the unchanged URL of an object store.

    Raises:
        WrongInput: As `local_path` and `expand_user`.
    """
    path = local_path(url)
    return url if path is None else str(expand_user(path).absolute())


def expand_user(path: Path) -> Path:
    """Return a path with the home of a user in place of ~ or ~user.

    Raises:
        WrongInput: There is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise WrongInput(
            f"'{path}' is in the home of the user '{path.parts[0][1:]}', whom this machine does not know",
            way_out="give the path without ~",
        ) from None


def readable_name(url: str, max_characters: int) -> str:
    """Return the last folder of a path or URL as lower-case letters, digits and hyphens; `images` without any."""
    folder = url.rstrip("/").rpartition("/")[2].lower()
    return re.sub("[^a-z0-9]+", "-", folder)[:max_characters].strip("-") or "images"
