"""The login of a stack: one string, which its server asks for and its workers, registration and users give."""

import base64
import os
import secrets
import tempfile
from pathlib import Path

from tasks.home import FOR_OTHERS, PRIVATE_FOLDER, make_home

OWN_STRING = "PREFECT_SERVER_API_AUTH_STRING"
"""Environment variable of a user who wants another string than the home's."""


def own_auth_string() -> str | None:
    """Return the string that the user has set, or None."""
    return os.environ.get(OWN_STRING) or None


def auth_file(home: Path) -> Path:
    """Return the file with the string of a home, which only its owner may read."""
    return home / "prefect" / "auth-string"


def auth_string(home: Path) -> str:
    """Return the string to log in with, `user:password`: the user's own, or the home's, made at its first use.

    A file that others could read is not trusted: a new string takes its place.
    """
    if (own := own_auth_string()) is not None:
        return own
    file = auth_file(home)
    if file.is_file() and not file.stat().st_mode & FOR_OTHERS and (kept := file.read_text().strip()):
        return kept
    made = f"lakevision:{secrets.token_urlsafe(24)}"
    make_home(home)
    file.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    # Readable by its owner alone from its first moment, and whole or not there.
    descriptor, partial = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as written:
        written.write(f"{made}\n")
    os.replace(partial, file)
    return made


def authorization(auth: str) -> dict[str, str]:
    """Return the header of a request that logs in."""
    return {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}
