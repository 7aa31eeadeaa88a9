"""File names of checkpoints, and their removal."""

from pathlib import Path

PARTIAL, UNREADABLE = ".partial", ".unreadable"


def remove_checkpoints(folder: Path) -> bool:
    """Remove all checkpoints of a finished or abandoned training run; return whether there were any."""
    found = [*folder.glob("*.pt"), *folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{UNREADABLE}")]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)
