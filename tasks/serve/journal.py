"""The journal of a service: answers, feedback and images on this machine, until they are rows of Delta tables.

A SQLite database in the home, to which all processes of all services write; it outlives any of them. A Delta commit
takes as long as hundreds of answers, and its files are few and large where rows come by thousands.
"""

import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from tasks.system.home import make_private_file
from tasks.system.locks import mount_of

logger = logging.getLogger("lakevision.serve")

Kind = Literal["requests", "feedback", "request_images"]
"""Names of the Delta tables that the rows are for."""

KINDS: tuple[Kind, ...] = ("request_images", "requests", "feedback")
"""In the order in which they are moved to the tables, so that a row of a table has its image and its request there."""

BUSY_SECONDS = 30.0
"""Time that a process waits for another one to end its write."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, key TEXT NOT NULL, row TEXT NOT NULL, content BLOB,
    UNIQUE (kind, key)
);
CREATE INDEX IF NOT EXISTS by_kind ON rows (kind, id);
CREATE TABLE IF NOT EXISTS answered (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS identity (name TEXT NOT NULL);
"""
"""`rows` are those that no table has yet, and `answered` the images with feedback, for ever: it is given once."""


class Pending(NamedTuple):
    """A row that no table has yet."""

    id: int
    row: dict[str, Any]
    content: bytes | None


class Journal:
    """The journal, opened by one process, whose threads share it."""

    def __init__(self, file: Path) -> None:
        """Open the database, which is created if it is missing, for its owner only.

        Raises:
            sqlite3.DatabaseError: The file is not a database, or it is damaged.
        """
        make_private_file(file)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(file, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        # A committed row outlives the process; after a loss of power, those since the last checkpoint may be missing.
        # A write-ahead log needs memory that its processes share, which a network file system does not have.
        mode = "DELETE" if mount_of(file.parent).is_shared() else "WAL"
        for setting in (f"journal_mode = {mode}", "synchronous = NORMAL"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(SCHEMA)
        with self._transaction() as database:
            new = "INSERT INTO identity SELECT ? WHERE NOT EXISTS (SELECT 1 FROM identity)"
            database.execute(new, (uuid4().hex,))
        self.identity = str(self._database.execute("SELECT name FROM identity").fetchone()[0])
        """Id of the journal, which names its transactions in the Delta tables."""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def add(self, kind: Kind, rows: Sequence[tuple[str, Mapping[str, Any], bytes | None]]) -> None:
        """Add rows, each with its key and a content; those whose key is there already are left out."""
        values = [(kind, key, json.dumps(row), content) for key, row, content in rows]
        with self._transaction() as database:
            database.executemany("INSERT OR IGNORE INTO rows (kind, key, row, content) VALUES (?, ?, ?, ?)", values)

    def add_feedback(self, key: str, row: Mapping[str, Any]) -> bool:
        """Add the feedback on an image; return False if there is feedback on it already."""
        with self._transaction() as database:
            added = database.execute("INSERT OR IGNORE INTO answered VALUES (?)", (key,)).rowcount == 1
            if added:
                database.execute("INSERT INTO rows (kind, key, row) VALUES ('feedback', ?, ?)", (key, json.dumps(row)))
        return added

    def has(self, kind: Kind, key: str) -> bool:
        """Return whether a row with this key is waiting for its table."""
        with self._lock:
            found = self._database.execute("SELECT 1 FROM rows WHERE kind = ? AND key = ?", (kind, key))
            return found.fetchone() is not None

    def pending(self, kind: Kind, limit: int) -> list[Pending]:
        """Return the oldest rows of a table that it does not have yet."""
        query = "SELECT id, row, content FROM rows WHERE kind = ? ORDER BY id LIMIT ?"
        with self._lock:
            found = self._database.execute(query, (kind, limit)).fetchall()
        return [Pending(number, json.loads(row), content) for number, row, content in found]

    def remove(self, kind: Kind, up_to: int) -> None:
        """Remove the rows that a table has."""
        with self._transaction() as database:
            database.execute("DELETE FROM rows WHERE kind = ? AND id <= ?", (kind, up_to))

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()


FLUSH_SECONDS = 0.25
"""Longest time that an answer is in memory alone: SIGKILL of a worker loses no older one."""

MAX_UNWRITTEN = 100_000
"""Rows in memory while the disk is full; more are lost, and counted."""


class JournalWriter:
    """A thread that writes rows to the journal, in batches, so that no answer waits for a disk."""

    def __init__(self, journal: Journal, on_lost: Callable[[int], None]) -> None:
        """Prepare the thread.

        Args:
            journal: The journal.
            on_lost: Called with a number of rows that are lost, since the disk is full for long.
        """
        self._journal, self._on_lost = journal, on_lost
        self._rows: dict[Kind, list[tuple[str, Mapping[str, Any], bytes | None]]] = {kind: [] for kind in KINDS}
        self._adding = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lakevision-journal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, kind: Kind, key: str, row: Mapping[str, Any], content: bytes | None = None) -> None:
        """Have a row written within FLUSH_SECONDS."""
        with self._adding:
            rows = self._rows[kind]
            rows.append((key, row, content))
            if (too_many := len(rows) - MAX_UNWRITTEN) > 0:
                del rows[:too_many]
                self._on_lost(too_many)

    def end(self) -> None:
        """Write the rows that are left, and end the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        for kind in KINDS:
            with self._adding:
                rows, self._rows[kind] = self._rows[kind], []
            if not rows:
                continue
            try:
                self._journal.add(kind, rows)
            except sqlite3.OperationalError as error:
                logger.warning("%d rows of '%s' are not in the journal yet: %s", len(rows), kind, error)
                with self._adding:
                    self._rows[kind] = rows + self._rows[kind]
