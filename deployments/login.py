"""The login of a stack: one string, which its server asks for and its workers, registration and users give."""

import base64
import os
import secrets
import stat
import tempfile
from pathlib import Path

from tasks.system.home import FOR_OTHERS, make_home, make_private_folder

OWN_STRING = "PREFECT_SERVER_API_AUTH_STRING"
"""Environment variable of a user who wants another string than the home's."""

MLFLOW_LOGIN = "LAKEVISION_MLFLOW_LOGIN"
"""Environment variable with the string that MLflow's UI asks for; it has none that logs in to Prefect."""


def own_auth_string() -> str | None:
    """Return the string that the user has set, or None."""
    return os.environ.get(OWN_STRING) or None


def auth_file(home: Path) -> Path:
    """Return the file with the string of a home, which only its owner may read."""
    return home / "prefect" / "auth-string"


def prepare_folder(home: Path) -> str | None:
    """Create the folder of a home that holds the login and the server's database; return what to tell the user, if any.

    Raises:
        WrongInput: The folder is not this user's, or is open to others.
    """
    told = make_home(home)
    make_private_folder(auth_file(home).parent)
    return told


def auth_string(home: Path) -> str:
    """Return the string to log in with, `user:password`: the user's own, or the home's, made at its first use.

    A file that others could read or write is not trusted: a new string takes its place.

    Raises:
        WrongInput: As `prepare_folder`.
    """
    if (own := own_auth_string()) is not None:
        return own
    prepare_folder(home)
    file = auth_file(home)
    if kept := _read_private(file):
        return kept
    made = f"lakevision:{secrets.token_urlsafe(24)}"
    # Readable by its owner alone from its first moment, and whole or not there.
    descriptor, partial = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as written:
        written.write(f"{made}\n")
    os.replace(partial, file)
    return made


def _read_private(file: Path) -> str:
    """Return the text of a file that belongs to this user alone; nothing of any other, nor of a link."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor) as opened:
        status = os.fstat(descriptor)
        private = status.st_uid == os.geteuid() and not status.st_mode & FOR_OTHERS
        return opened.read().strip() if private and stat.S_ISREG(status.st_mode) else ""


def authorization(auth: str) -> dict[str, str]:
    """Return the header of a request that logs in."""
    return {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}
