"""Exclusive locks between two processes."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.errors import LockLost
from tasks.system import locks
from tasks.system.locks import (
    LeaseCheck,
    Mount,
    check_leases,
    exclusive_lock,
    lock_lost,
    locking_with,
    unlocked_warning,
)
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


@contextmanager
def note(held: list[str], url: str) -> Iterator[LeaseCheck]:
    """Note the URL as long as its lock is held, and let the check of its lease fail from then on."""
    held.append(url)

    def check() -> None:
        raise lock_lost(url, "no answer")

    yield check
    held.remove(url)


def test_leases_of_held_locks_are_checked(tmp_path: Path) -> None:
    """The check of a lock raises its error as long as the lock is held; a file lock has no lease."""
    with locking_with(lambda url: note([], url)), exclusive_lock(str(tmp_path / "images")):
        check_leases()
        message = "'s3a://bucket/tables/images' was not renewed .no answer."
        with exclusive_lock("s3a://bucket/tables/images"), pytest.raises(LockLost, match=message):
            check_leases()
        check_leases()


def test_server_lock_is_held_for_a_store_and_not_for_a_local_disk(tmp_path: Path) -> None:
    """On a local disk the file lock excludes every other run, and ends with its process."""
    held: list[str] = []
    with locking_with(lambda url: note(held, url)):
        with exclusive_lock("s3a://bucket/tables/images"):
            assert held == ["s3a://bucket/tables/images"]
        assert held == []
        with exclusive_lock(str(tmp_path / "images")):
            assert held == []
    with exclusive_lock("s3a://bucket/tables/images"):
        assert held == []


def test_shared_file_system_has_the_server_lock_or_a_warning(tmp_path: Path, messages_of, monkeypatch) -> None:
    """Without a server, another machine's driver cannot be detected, and the log says so before work starts."""
    monkeypatch.setattr(locks, "mount_of", lambda path: Mount("/mnt", "fuse.sshfs", frozenset({"rw"})))
    place, held = str(tmp_path / "images"), []
    with locking_with(lambda url: note(held, url)), exclusive_lock(place):
        assert held == [place]
        assert unlocked_warning(place) is None
    assert messages_of("lakevision.locks") == []
    with exclusive_lock(place):
        pass
    (message,) = messages_of("lakevision.locks")
    assert message == unlocked_warning(place)
    assert "(fuse.sshfs) whose locks may hold on this machine only: run one driver at a time, or set PREFECT" in message


def test_nfs_with_locks_of_its_server_has_no_warning(tmp_path: Path, monkeypatch) -> None:
    """NFS sends file locks to its server."""
    monkeypatch.setattr(locks, "mount_of", lambda path: Mount("/mnt", "nfs4", frozenset({"rw", "local_lock=none"})))
    assert unlocked_warning(str(tmp_path / "images")) is None
