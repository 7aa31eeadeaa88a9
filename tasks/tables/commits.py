"""The commits in a table's log: their times, and the files of their changes, read without Spark."""

from dataclasses import dataclass
from typing import Any

from tasks.object_store import file_system, list_names
from tasks.tables.delta import COMMITTED_NAME, read_commit


@dataclass(frozen=True)
class Commit:
    """A commit of a table.

    Attributes:
        version: The version that it made.
        num_files: Number of files from which the change data feed has its rows; 0 if it changed none.
        seconds: Its time, in seconds since 1970.
    """

    version: int
    num_files: int
    seconds: float


def commits_after(path: str, version: int) -> list[Commit]:
    """Return the commits after a version in their order, without Spark and without those that the log no longer has."""
    filesystem, root = file_system(path)
    names = sorted(name for name in list_names(f"{path.rstrip('/')}/_delta_log") if COMMITTED_NAME.fullmatch(name))
    found = []
    for name in names:
        if int(name[:20]) <= version:
            continue
        kinds: dict[str, list[Any]] = {"cdc": [], "add": [], "remove": [], "commitInfo": []}
        for action in read_commit(filesystem, f"{root}/_delta_log/{name}"):
            for kind in kinds.keys() & action.keys():
                kinds[kind].append(action[kind])
        changed = [file for file in kinds["add"] + kinds["remove"] if file["dataChange"]]
        info = kinds["commitInfo"][0] if kinds["commitInfo"] else {}
        at = info.get("inCommitTimestamp") or info.get("timestamp") or 0
        found.append(Commit(int(name[:20]), len(kinds["cdc"] or changed), at / 1000))
    return found
