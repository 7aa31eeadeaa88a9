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

from tasks.serve.repeated import Repeated
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
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, tables TEXT NOT NULL, key TEXT NOT NULL,
    row TEXT NOT NULL, content BLOB, UNIQUE (kind, tables, key)
);
CREATE INDEX IF NOT EXISTS by_kind ON rows (kind, tables, id);
CREATE TABLE IF NOT EXISTS answered (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS identity (name TEXT NOT NULL);
"""
"""`rows` are those that no table has yet; tables is the folder or URL of the Delta tables that they are for.

`answered` are the images with feedback, for ever: it is given once.
"""

PENDING_BYTES = 64 << 20
"""Size of the rows that are read at once, from which on the others are left for the next time: they are in memory."""


class NewRow(NamedTuple):
    """A row to add.

    Attributes:
        tables: Folder or URL of its tables.
        key: Its key.
        row: Its values, with times as text.
        content: Content of an image, or None.
    """

    tables: str
    key: str
    row: Mapping[str, Any]
    content: bytes | None = None


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
        # The bytes of a removed image do not stay in the file.
        for setting in (f"journal_mode = {mode}", "synchronous = NORMAL", "secure_delete = ON"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(SCHEMA)
        with self._transaction() as database:
            new = "INSERT INTO identity SELECT ? WHERE NOT EXISTS (SELECT 1 FROM identity)"
            database.execute(new, (uuid4().hex,))
        self.identity = str(self._database.execute("SELECT name FROM identity").fetchone()[0])
        """Id of the journal, which names its transactions in the Delta tables."""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._database:  # It commits, or rolls back after an error, also of the commit.
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database

    def add(self, kind: Kind, rows: Sequence[NewRow]) -> None:
        """Add rows; those whose key is there already are left out."""
        with self._transaction() as database:
            _insert(database, kind, rows)

    def add_feedback(self, row: NewRow) -> bool:
        """Add the feedback on an image; return False if there is feedback on it already."""
        with self._transaction() as database:
            added = database.execute("INSERT OR IGNORE INTO answered VALUES (?)", (row.key,)).rowcount == 1
            if added:
                _insert(database, "feedback", [row])
        return added

    def has(self, kind: Kind, key: str) -> bool:
        """Return whether a row with this key is waiting for its table."""
        with self._lock:
            found = self._database.execute("SELECT 1 FROM rows WHERE kind = ? AND key = ?", (kind, key))
            return found.fetchone() is not None

    def newest(self) -> dict[str, int]:
        """Return the tables that rows are for, each with the number of the last of these."""
        with self._lock:
            return dict(self._database.execute("SELECT tables, max(id) FROM rows GROUP BY tables").fetchall())

    def pending(self, kind: Kind, tables: str, up_to: int) -> list[Pending]:
        """Return the oldest rows that a table does not have yet, of PENDING_BYTES at most; it has one at least.

        Args:
            kind: Name of the table.
            tables: Folder or URL of the tables.
            up_to: Number of the last row.
        """
        query = "SELECT id, row, content FROM rows WHERE kind = ? AND tables = ? AND id <= ? ORDER BY id"
        found: list[Pending] = []
        size = 0
        with self._lock:
            for number, row, content in self._database.execute(query, (kind, tables, up_to)):
                size += len(row) + len(content or b"")
                if found and size > PENDING_BYTES:
                    break
                found.append(Pending(number, json.loads(row), content))
        return found

    def remove(self, kind: Kind, tables: str, up_to: int) -> None:
        """Remove the rows that a table has."""
        with self._transaction() as database:
            database.execute("DELETE FROM rows WHERE kind = ? AND tables = ? AND id <= ?", (kind, tables, up_to))

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()


def _insert(database: sqlite3.Connection, kind: Kind, rows: Sequence[NewRow]) -> None:
    values = [(kind, new.tables, new.key, json.dumps(new.row), new.content) for new in rows]
    query = "INSERT OR IGNORE INTO rows (kind, tables, key, row, content) VALUES (?, ?, ?, ?, ?)"
    database.executemany(query, values)


FLUSH_SECONDS = 0.25
"""Longest time that an answer is in memory alone: SIGKILL of a worker loses no older one."""

MAX_UNWRITTEN: dict[Kind, int] = {"requests": 100_000, "feedback": 100_000, "request_images": 200}
"""Rows in memory while the disk is full; more are lost, and counted. Those of images have megabytes."""


class JournalWriter(Repeated):
    """A thread that writes rows to the journal, in batches, so that no answer waits for a disk.

    Attributes:
        journal: The journal.
    """

    def __init__(self, journal: Journal, on_lost: Callable[[int], None]) -> None:
        """Prepare the thread.

        Args:
            journal: The journal.
            on_lost: Called with a number of rows that are lost, since the disk is full for long.
        """
        super().__init__("lakevision-journal", FLUSH_SECONDS, self._flush, once_more=True)
        self.journal, self._on_lost = journal, on_lost
        self._rows: dict[Kind, list[NewRow]] = {kind: [] for kind in KINDS}
        self._adding = threading.Lock()

    def put(self, kind: Kind, row: NewRow) -> None:
        """Have a row written within FLUSH_SECONDS."""
        with self._adding:
            rows = self._rows[kind]
            rows.append(row)
            if (too_many := len(rows) - MAX_UNWRITTEN[kind]) > 0:
                del rows[:too_many]
                self._on_lost(too_many)

    def _flush(self) -> None:
        for kind in KINDS:
            with self._adding:
                rows, self._rows[kind] = self._rows[kind], []
            if not rows:
                continue
            try:
                self.journal.add(kind, rows)
            except sqlite3.Error as error:
                logger.warning("%d rows of '%s' are not in the journal yet: %s", len(rows), kind, error)
                with self._adding:
                    self._rows[kind] = rows + self._rows[kind]
