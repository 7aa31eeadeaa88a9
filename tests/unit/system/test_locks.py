"""Two processes that want the same place."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

from tasks.system.locks import exclusive_lock
from tests.builders.processes import ROOT

HOLDER = """
import sys
from tasks.system.locks import exclusive_lock
with exclusive_lock(sys.argv[1]):
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_the_second_waits_and_is_told_so(tmp_path: Path, caplog, said) -> None:
    """Also where the first is killed and says nothing."""
    caplog.set_level("INFO", "lakevision")
    place = str(tmp_path / "tables" / "images")
    command = [sys.executable, "-c", HOLDER, place]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "has it\n"
        threading.Timer(0.5, first.kill).start()
        with exclusive_lock(place):
            assert first.wait() == -signal.SIGKILL
    assert said("lakevision.turns") == [f"another run writes to {place}: waiting until it ends"]
    with exclusive_lock(place):
        assert len(said("lakevision.turns")) == 1


def test_an_object_store_has_no_turns(tmp_path: Path, monkeypatch) -> None:
    """What writes there must bear others; nothing is made on this machine for it."""
    monkeypatch.chdir(tmp_path)
    with exclusive_lock("s3a://bucket/tables/images"), exclusive_lock("s3a://bucket/tables/images"):
        assert not list(tmp_path.iterdir())
