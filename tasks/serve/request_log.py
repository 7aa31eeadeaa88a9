"""The Delta tables `requests`, `feedback` and `request_images`: rows of the journal, moved without Spark, each once."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.dataset import Expression, field

from tasks.errors import WrongInput
from tasks.schema import FEEDBACK_ARROW, REQUEST_IMAGES_ARROW, REQUESTS_ARROW, columns_of
from tasks.serve.journal import KINDS, Journal, Kind
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables.delta import newest_commit
from tasks.tables.direct_commits import append_rows, needs_spark, open_newest, stored_rows
from tasks.tables.writer import commit, write_access

logger = logging.getLogger("lakevision.serve")

SCHEMAS: dict[Kind, pa.Schema] = {
    "requests": REQUESTS_ARROW,
    "feedback": FEEDBACK_ARROW,
    "request_images": REQUEST_IMAGES_ARROW,
}
PARTITION = ("day",)

VACUUM_HOURS = 24
"""Hours after its removal from the table for which the file of an image stays, for readers of an older version."""


def journal_file(storage: Storage) -> Path:
    """Return the file of a home's journal."""
    return Path(storage.home) / "serve" / "journal.db"


def check_tables(storage: Storage) -> None:
    """Check that the tables can be written without Spark.

    Raises:
        WrongInput: They cannot.
    """
    if needs_spark(storage.table("requests")):
        raise WrongInput(
            f"serve.log_requests is true, but the table '{storage.table('requests')}' can only be written by Spark",
            setting="serve.log_requests",
            way_out="set it to false, or give tables in a folder or on S3",
        )


def move_rows(journal: Journal, storage: Storage) -> None:
    """Move the rows of a journal to their Delta tables, which are created if they are missing.

    Rows that come meanwhile are left for the next time: each commit is a file. It names the last row that it has, as a
    transaction of the journal. So after a kill before the rows are removed from the journal, they are not added again.

    Raises:
        DiskFull: The disk is full; the rows stay in the journal.
        NeedsSpark: A table can only be written by Spark.
    """
    # One process at a time moves rows, so that each sees the other's transaction.
    with exclusive_lock(str(journal_file(storage))):
        for tables, newest in journal.newest().items():
            for kind in KINDS:
                _move(journal, kind, storage.model_copy(update={"tables": tables}), newest)


def _move(journal: Journal, kind: Kind, storage: Storage, newest: int) -> None:
    path, transaction = storage.table(kind), f"lakevision-{kind}-{journal.identity}"
    while pending := journal.pending(kind, storage.tables, newest):
        last, is_new = pending[-1].id, newest_commit(path) is None
        known = 0 if is_new else open_newest(path).transaction_version(transaction) or 0
        rows = [_typed(row.row, row.content, SCHEMAS[kind]) for row in pending if row.id > known]
        if rows:
            with write_access(path), translate_disk_full(path, storage.home):
                new = _new_images(storage, rows) if kind == "request_images" else rows
                if new:
                    append_rows(path, pa.Table.from_pylist(new, SCHEMAS[kind]), None, PARTITION, (transaction, last))
        journal.remove(kind, storage.tables, last)


def _new_images(storage: Storage, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the images that the table does not have on the same day: it has one row a day of the same image."""
    kept, digest = set(), columns_of(REQUEST_IMAGES_ARROW, "sha256")
    try:
        for day in {row["day"] for row in rows}:
            found = rows_of(storage, "request_images", digest, day=day)["sha256"]
            kept |= {(day, sha256) for sha256 in found.to_pylist()}
    except (OSError, pa.ArrowInvalid) as error:  # A second row of an image is better than a log that stops.
        logger.warning("an image may be stored twice, since those of its day cannot be read: %s", error)
    return [row for row in rows if (row["day"], row["sha256"]) not in kept]


def _typed(row: dict[str, Any], content: bytes | None, schema: pa.Schema) -> dict[str, Any]:
    """Return a row of the journal with times, and its content, as values of a table."""
    times = {
        name: datetime.fromisoformat(value)
        for name, value in row.items()
        if isinstance(value, str) and pa.types.is_timestamp(schema.field(name).type)
    }
    return row | times | ({} if content is None else {"content": content})


def has_request(storage: Storage, request_id: str, image: int) -> bool:
    """Return whether the table `requests` has an image of a request, whose id begins with its day.

    Raises:
        NeedsSpark: As `move_rows`.
    """
    is_it = (field("request_id") == request_id) & (field("image") == image)
    columns = columns_of(REQUESTS_ARROW, "request_id", "image")
    return bool(rows_of(storage, "requests", columns, is_it, request_id[:10]).num_rows)


def rows_of(
    storage: Storage, kind: Kind, columns: pa.Schema, where: Expression | None = None, day: str | None = None
) -> pa.Table:
    """Return these columns of a table's rows; none if it does not exist.

    Args:
        storage: Location of the table.
        kind: The table.
        columns: Columns besides `day`.
        where: Condition of the rows; None for all.
        day: Day of the rows; None for all.

    Raises:
        NeedsSpark: As `move_rows`.
    """
    partition = None if day is None else {"day": day}
    return stored_rows(storage.table(kind), SCHEMAS[kind], columns.names, where, partition)


def remove_old_images(storage: Storage, days: int, now: datetime | None = None) -> None:
    """Remove kept images that are older than so many days; their files leave the disk a day later.

    Args:
        storage: Location of the table.
        days: The number of days; 0: none are removed.
        now: The time; None for the present.
    """
    path = storage.table("request_images")
    if not days or newest_commit(path) is None:
        return
    oldest = ((now or datetime.now(UTC)) - timedelta(days=days)).date().isoformat()
    with write_access(path):
        table = open_newest(path)
        if any(values["day"] < oldest for values in pa.table(table.get_add_actions())["partition"].to_pylist()):
            commit(path, lambda: table.delete(f"day < '{oldest}'"))
            logger.info("images of requests before %s were removed from '%s'", oldest, path)
        commit(path, lambda: table.vacuum(VACUUM_HOURS, dry_run=False, enforce_retention_duration=False))
