"""The login of a stack: one string for its server, workers, registration and users."""

import base64
import os
import secrets
import stat
import tempfile
from pathlib import Path

from tasks.system.home import FOR_OTHERS, make_home, make_private_folder

OWN_STRING = "PREFECT_SERVER_API_AUTH_STRING"
"""Environment variable with which a user sets a login other than the home's."""

MLFLOW_LOGIN = "LAKEVISION_MLFLOW_LOGIN"
"""Environment variable with the login that MLflow's UI requires; its process gets no variable for Prefect's login."""


def own_auth_string() -> str | None:
    """Return the login that the user has set, or None."""
    return os.environ.get(OWN_STRING) or None


def auth_file(home: Path) -> Path:
    """Return the file with the login of a home, which only its owner may read."""
    return home / "prefect" / "auth-string"


def prepare_folder(home: Path) -> str | None:
    """Create the folder of a home for the login and the server's database; return a message for the user, or None.

    Raises:
        WrongInput: The folder does not belong to this user, or is accessible to others.
    """
    message = make_home(home)
    make_private_folder(auth_file(home).parent)
    return message


def auth_string(home: Path) -> str:
    """Return the login, `user:password`: the user's own, or the home's, which is generated on first use.

    A file that others could read or write is not trusted: a new login replaces it.

    Raises:
        WrongInput: As `prepare_folder`.
    """
    if (own := own_auth_string()) is not None:
        return own
    prepare_folder(home)
    file = auth_file(home)
    if kept := _read_private(file):
        return kept
    generated = f"lakevision:{secrets.token_urlsafe(24)}"
    # Readable by its owner only from the moment it is created, and replaced atomically.
    descriptor, partial = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as written:
        written.write(f"{generated}\n")
    os.replace(partial, file)
    return generated


def _read_private(file: Path) -> str:
    """Return the text of a regular file that only this user can access, else ""; links are not followed."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor) as opened:
        status = os.fstat(descriptor)
        private = status.st_uid == os.geteuid() and not status.st_mode & FOR_OTHERS
        return opened.read().strip() if private and stat.S_ISREG(status.st_mode) else ""


def authorization(auth: str) -> dict[str, str]:
    """Return the authorization header of a request."""
    return {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}
