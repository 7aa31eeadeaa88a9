"""Temporary files go with their session, or with the next."""

import subprocess
import sys
from pathlib import Path

from tasks.spark.scratch import Scratch
from tests.builders.processes import ROOT

KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.spark.scratch import Scratch
(Scratch(Path(sys.argv[1])).folder / "spilled").write_bytes(b"images")
os.kill(os.getpid(), signal.SIGKILL)
"""


def folders(root: Path) -> list[Path]:
    """Return the folders of sessions."""
    return [path for path in root.iterdir() if path.is_dir()]


def test_a_killed_session_is_cleaned_up_after_and_a_living_one_is_not(tmp_path: Path) -> None:
    """Nothing but the lock of the whole stays."""
    living = Scratch(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert len(folders(tmp_path)) == 2
    another = Scratch(tmp_path)
    assert sorted(folders(tmp_path)) == sorted([living.folder, another.folder])
    living.remove()
    another.remove()
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []
