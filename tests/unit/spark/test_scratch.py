"""Temporary files of sessions, which are removed with their session or by the next one."""

import socket
import subprocess
import sys
from pathlib import Path

from tasks.spark.scratch import Scratch, remove_abandoned
from tests.builders.processes import ROOT

KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.spark.scratch import Scratch
(Scratch(Path(sys.argv[1])).folder / "spilled").write_bytes(b"images")
os.kill(os.getpid(), signal.SIGKILL)
"""


def folders(root: Path) -> list[Path]:
    """Return the folders of the sessions."""
    return [path for path in root.iterdir() if path.is_dir()]


def test_folders_of_killed_sessions_are_removed_by_the_next(tmp_path: Path) -> None:
    """A new session removes the folders of killed sessions and not of running ones; the root's lock file remains."""
    running = Scratch(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert len(folders(tmp_path)) == 2
    new = Scratch(tmp_path)
    assert sorted(folders(tmp_path)) == sorted([running.folder, new.folder])
    running.remove()
    new.remove()
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def test_folder_of_another_machine_is_kept_where_its_lock_is_not_seen(tmp_path: Path) -> None:
    """A shared home may be on a file system whose locks hold on one machine only: the other session may be alive."""
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    elsewhere = [tmp_path / f"{name}-{'0' * 32}" for name in ("another-machine", f"{socket.gethostname()}-1")]
    for folder in elsewhere:
        folder.mkdir()
    remove_abandoned(tmp_path, locks_hold=False)
    assert sorted(folders(tmp_path)) == sorted(elsewhere)
    remove_abandoned(tmp_path, locks_hold=True)
    assert folders(tmp_path) == []
