"""The versions of this code and of its packages, which all hosts share; uses only the standard library."""

import hashlib
import platform
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = ("torch", "horovod", "numpy")
"""Packages whose versions ranks share: gradients are exchanged between them, and all compute the same."""


def code_folder() -> Path:
    """Return the folder that contains the package `tasks`."""
    return Path(__file__).resolve().parents[2]


def code_versions() -> dict[str, str]:
    """Return a digest of the code, and the versions of Python and of the packages that ranks share."""
    digest, folder = hashlib.sha256(), code_folder() / "tasks"
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return {
        "code": digest.hexdigest()[:12],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{package: next((found.version for found in distributions(name=package)), "none") for package in PACKAGES},
    }
