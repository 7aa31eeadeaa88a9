"""Exclusive locks between two processes."""

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
    print("acquired", flush=True)
    sys.stdin.read()
"""


def test_second_process_waits_and_logs_it(tmp_path: Path, caplog, messages_of) -> None:
    """The second process waits for the lock until the first is killed, and logs that once."""
    caplog.set_level("INFO", "lakevision")
    place = str(tmp_path / "tables" / "images")
    command = [sys.executable, "-c", HOLDER, place]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "acquired\n"
        threading.Timer(0.5, first.kill).start()
        with exclusive_lock(place):
            assert first.wait() == -signal.SIGKILL
    assert messages_of("lakevision.locks") == [f"another run writes to {place}: waiting until it ends"]
    with exclusive_lock(place):
        assert len(messages_of("lakevision.locks")) == 1


def test_object_store_has_no_lock(tmp_path: Path, monkeypatch) -> None:
    """A lock of an object store is never waited for, and creates no local file."""
    monkeypatch.chdir(tmp_path)
    with exclusive_lock("s3a://bucket/tables/images"), exclusive_lock("s3a://bucket/tables/images"):
        assert not list(tmp_path.iterdir())
