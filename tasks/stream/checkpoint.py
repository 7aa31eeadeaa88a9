"""The checkpoint of a stream: its folder, the position that it records, and the lag behind the table by it."""

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from tasks.errors import WrongInput
from tasks.object_store import file_system, list_names
from tasks.stream.run import Lag
from tasks.tables.delta import Commit, commits_after

RESTART = (
    "set stream.restart to true for one run, which starts again with all images, predicts only those without a "
    "prediction, and loses none"
)
"""The way out of a stream that cannot be continued."""


@dataclass(frozen=True)
class Position:
    """The part of its source that a stream has processed, by its checkpoint.

    Attributes:
        offset: The source's own record of the last batch that ended, or None before the first.
        is_unfinished: Whether a batch was begun after it, which the next run repeats.
    """

    offset: dict[str, Any] | None
    is_unfinished: bool


def checkpoint_root(predictions: str, *source: str) -> str:
    """Return the folder of a stream's checkpoints, beside the table of predictions.

    It is not in a table's own folder, which must be empty before the table is created, nor is it named like a table.

    Args:
        predictions: Path or URL of the table of predictions.
        source: All that identifies the stream. Another of them is another stream, with a checkpoint of its own.
    """
    digest = hashlib.sha256(json.dumps(source).encode()).hexdigest()
    return f"{predictions.rstrip('/')}.streams/{digest[:16]}"


def open_checkpoint(root: str, *, restart: bool) -> str:
    """Return the folder of the checkpoint to continue or to begin; the caller has the exclusive lock of `root`.

    A restart begins the next folder. If it is killed, none is left half deleted: the newest one counts.

    Args:
        root: As `checkpoint_root`.
        restart: Whether the stream starts again.
    """
    numbers = _numbers(root)
    newest = max(numbers, default=0)
    return f"{root}/{newest + 1 if restart and numbers else newest}"


def remove_older(checkpoint: str) -> None:
    """Remove the checkpoints before this one, which has a batch; the caller has the exclusive lock of their root."""
    root, number = checkpoint.rsplit("/", 1)
    filesystem, folder = file_system(root)
    for older in _numbers(root):
        if older < int(number):
            filesystem.rm(f"{folder}/{older}", recursive=True)


def read_position(checkpoint: str) -> Position:
    """Return the position that a checkpoint records, without Spark.

    Raises:
        WrongInput: Files of the checkpoint are damaged or missing.
    """
    batches, ended = (_numbers(f"{checkpoint}/{folder}") for folder in ("offsets", "commits"))
    names = list_names(checkpoint)
    if "metadata" in names:
        _read(checkpoint, "metadata")
    if not batches and not ended:
        return Position(None, is_unfinished=False)
    if "metadata" not in names or not batches or (ended and ended[-1] not in batches):
        raise damaged(checkpoint, "files are missing")
    offset = _read(checkpoint, f"offsets/{ended[-1]}") if ended else None
    return Position(offset, is_unfinished=not ended or batches[-1] > ended[-1])


def read_begun(checkpoint: str) -> Position:
    """Return the position after the newest batch that was begun: for that batch, the one at its end.

    Raises:
        WrongInput: As `read_position`.
    """
    return Position(_read(checkpoint, f"offsets/{_numbers(f'{checkpoint}/offsets')[-1]}"), is_unfinished=False)


def _numbers(folder: str) -> list[int]:
    return sorted(int(name) for name in list_names(folder) if name.isdecimal())


def _read(checkpoint: str, name: str) -> dict[str, Any]:
    """Return the last line of a file of the checkpoint: of a batch's offsets, that of its only source."""
    filesystem, root = file_system(checkpoint)
    try:
        found = json.loads(filesystem.cat_file(f"{root}/{name}").decode().splitlines()[-1])
    except (ValueError, IndexError):
        raise damaged(checkpoint, f"{name} cannot be read") from None
    if not isinstance(found, dict):
        raise damaged(checkpoint, f"{name} cannot be read")
    return found


def damaged(checkpoint: str, why: str) -> WrongInput:
    """Return the error of a checkpoint that cannot be continued, with the way out."""
    return WrongInput(f"the checkpoint '{checkpoint}' of the stream is damaged ({why})", way_out=RESTART)


def measure_lag(path: str, position: Position) -> Lag:
    """Return the lag of a stream that reads the change data feed of a table, without Spark.

    Args:
        path: Path or URL of the table.
        position: Position of the stream.
    """
    return lag_of(commits_after(path, processed_version(position)), position, time.time())


def processed_version(position: Position) -> int:
    """Return the newest version before which all versions are processed; -1 if the first one is not."""
    return -1 if position.offset is None else int(position.offset["reservoirVersion"]) - 1


def lag_of(commits: list[Commit], position: Position, now: float) -> Lag:
    """Return the lag at a time, from the commits after the processed version.

    Args:
        commits: The commits, in order.
        position: Position of the stream.
        now: Seconds since 1970.
    """
    offset = position.offset
    pending = [commit for commit in commits if commit.num_files]
    # Commits that the log no longer has may have changed rows.
    missing = commits[0].version - processed_version(position) - 1 if commits else 0
    if offset is None or offset["isStartingVersion"]:
        # A new stream reads the newest version as a whole.
        pending, missing = (pending or commits)[-1:] if missing else pending[-1:], 0
    elif missing:
        oldest = (pending or commits)[0]
        return Lag(missing + len(pending), max(0.0, now - oldest.seconds))
    elif pending and pending[0].version == int(offset["reservoirVersion"]):
        is_read = int(offset["index"]) + 1 >= pending[0].num_files  # The index is that of the last file that was read.
        pending = pending[1:] if is_read else pending
    return Lag(len(pending), max(0.0, now - pending[0].seconds) if pending else 0.0)
