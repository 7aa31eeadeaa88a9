"""The journal of a service: rows are there once, in their order, and outlive the process."""

import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tasks.serve import journal as module
from tasks.serve.journal import FLUSH_SECONDS, Journal, JournalWriter, Kind, NewRow, Pending
from tests.builders.processes import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of a journal."""
    return tmp_path / "journal.db"


TABLES = "/tables"


def row(key: str, **values: object) -> NewRow:
    """Return a row to add."""
    return NewRow(TABLES, key, values)


def pending(journal: Journal, kind: Kind, tables: str = TABLES) -> list[Pending]:
    """Return all rows of a table that it does not have yet."""
    return journal.pending(kind, tables, 2**62)


def test_rows_of_several_services_are_for_the_tables_of_each(file: Path) -> None:
    """With the same keys, and in one order."""
    journal = Journal(file)
    for tables in ("/photos", "/digits", "/photos"):
        journal.add("requests", [NewRow(tables, "a 0", {"of": tables})])

    assert journal.newest() == {"/photos": 1, "/digits": 2}
    journal.remove("requests", "/photos", 2**62)
    assert pending(journal, "requests", "/photos") == []
    assert [one.row for one in pending(journal, "requests", "/digits")] == [{"of": "/digits"}]


def test_rows_are_read_in_parts_that_fit_into_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images, which have megabytes; a part has one row at least."""
    monkeypatch.setattr(module, "PENDING_BYTES", 250)
    journal = Journal(file)
    journal.add(
        "request_images", [NewRow(TABLES, f"{number}", {}, bytes(100 + 300 * (number == 2))) for number in range(4)]
    )
    sizes = []
    while part := pending(journal, "request_images"):
        sizes.append([len(one.content or b"") for one in part])
        journal.remove("request_images", TABLES, part[-1].id)

    assert sizes == [[100, 100], [400], [100]]


def test_a_transaction_that_fails_leaves_the_database_free(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the next row, of this process and of others."""
    journal = Journal(file)
    with pytest.raises(TypeError):
        journal.add("requests", [row("a 0"), row("b 0", number=object())])
    journal.add("requests", [row("c 0")])
    Journal(file).add("requests", [row("d 0")])

    assert [journal.has("requests", f"{name} 0") for name in "abcd"] == [False, False, True, True]


def test_rows_are_pending_in_their_order_until_they_are_removed(file: Path) -> None:
    """Those of one table do not affect those of another."""
    journal = Journal(file)
    journal.add("requests", [row("a 0", label="cat"), row("b 0", label="dog")])
    journal.add("request_images", [NewRow(TABLES, "day a", {"sha256": "a"}, b"\x00\xff")])

    first, second = pending(journal, "requests")
    assert [first.row, second.row] == [{"label": "cat"}, {"label": "dog"}]
    assert journal.pending("requests", TABLES, first.id) == [first]
    journal.remove("requests", TABLES, first.id)

    assert pending(journal, "requests") == [second]
    assert [row.content for row in pending(journal, "request_images")] == [b"\x00\xff"]


def test_a_row_with_a_known_key_is_left_out(file: Path) -> None:
    """An image that comes again on the same day is kept once."""
    journal = Journal(file)
    for content in (b"one", b"two"):
        journal.add("request_images", [NewRow(TABLES, "day a", {}, content)])

    assert [row.content for row in pending(journal, "request_images")] == [b"one"]
    assert journal.has("request_images", "day a")
    assert not journal.has("requests", "day a")


def test_feedback_is_given_once_for_ever(file: Path) -> None:
    """Also after its row was moved to the table."""
    journal = Journal(file)

    assert journal.add_feedback(row("a 0", label="cat"))
    assert not journal.add_feedback(row("a 0", label="dog"))
    (found,) = pending(journal, "feedback")
    journal.remove("feedback", TABLES, found.id)

    assert found.row == {"label": "cat"}
    assert not journal.add_feedback(row("a 0", label="dog"))
    assert pending(journal, "feedback") == []


def test_the_journal_outlives_its_process(file: Path) -> None:
    """With its identity, by which a table knows its rows; SIGKILL loses no row that was added."""
    program = (
        "import os, signal, sys; from pathlib import Path; from tasks.serve.journal import Journal, NewRow\n"
        "journal = Journal(Path(sys.argv[1])); journal.add('requests', [NewRow('/tables', 'a 0', {'label': 'cat'})])\n"
        "print(journal.identity, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    journal = Journal(file)

    assert done.returncode == -9, done.stderr
    assert journal.identity == done.stdout.strip()
    assert [row.row for row in pending(journal, "requests")] == [{"label": "cat"}]


def test_numbers_of_rows_are_never_used_again(file: Path) -> None:
    """A table remembers the last one: a row with a smaller number would count as moved."""
    journal = Journal(file)
    journal.add("requests", [row("a 0")])
    (first,) = pending(journal, "requests")
    journal.remove("requests", TABLES, first.id)
    journal.close()
    again = Journal(file)
    again.add("requests", [row("b 0")])

    assert pending(again, "requests")[0].id > first.id


def test_only_its_owner_reads_it(file: Path) -> None:
    """It has images and answers in it."""
    Journal(file).add("requests", [row("a 0")])

    for each in file.parent.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600, each


@pytest.mark.parametrize(("is_shared", "mode"), [(False, "wal"), (True, "delete")])
def test_the_log_is_one_that_the_file_system_can_hold(
    file: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool, mode: str
) -> None:
    """Processes of a network file system share no memory."""
    monkeypatch.setattr("tasks.system.locks.Mount.is_shared", lambda _self: is_shared)
    Journal(file).add("requests", [row("a 0")])

    with closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == (mode,)


def test_a_damaged_file_is_not_overwritten(file: Path) -> None:
    """It is refused as it is."""
    file.write_bytes(b"this is not a database, but a text of more than a hundred bytes: " * 4)
    before = file.read_bytes()

    with pytest.raises(sqlite3.DatabaseError):
        Journal(file)
    assert file.read_bytes() == before


def test_the_writer_writes_soon_and_at_its_end(file: Path) -> None:
    """Within the time after which SIGKILL loses nothing, and all at SIGTERM."""
    journal = Journal(file)
    writer = JournalWriter(journal, lambda _num: None)
    writer.start()
    writer.put("requests", row("a 0", number=1))
    until = time.monotonic() + 20 * FLUSH_SECONDS + 10
    while not journal.has("requests", "a 0") and time.monotonic() < until:
        time.sleep(0.05)
    written = journal.has("requests", "a 0")
    writer.put("requests", row("b 0", number=2))
    writer.put("request_images", NewRow(TABLES, "day b", {}, b"image"))
    writer.end()

    assert written
    assert [row.row for row in pending(journal, "requests")] == [{"number": 1}, {"number": 2}]
    assert journal.has("request_images", "day b")


def test_rows_wait_while_the_disk_is_full(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written in their order once it has space; beyond a limit the oldest are lost, and counted."""
    journal, add, lost = Journal(file), Journal.add, []
    monkeypatch.setattr(module, "MAX_UNWRITTEN", {"requests": 3})

    def full(*_arguments: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Journal, "add", full)
    writer = JournalWriter(journal, lost.append)
    for number in range(2):
        writer.put("requests", row(f"{number} 0", number=number))
    writer._flush()
    for number in range(2, 5):
        writer.put("requests", row(f"{number} 0", number=number))
    monkeypatch.setattr(Journal, "add", add)
    writer._flush()

    assert [row.row["number"] for row in pending(journal, "requests")] == [2, 3, 4]
    assert sum(lost) == 2
