"""The files of a training's checkpoints, whatever is in them."""

from pathlib import Path

PARTIAL, UNREADABLE = ".partial", ".unreadable"


def remove_checkpoints(folder: Path) -> bool:
    """Remove all checkpoints of a training that is finished, or given up; say whether there was one."""
    found = [*folder.glob("*.pt"), *folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{UNREADABLE}")]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)
