"""A streaming query that is run to its end, or stopped with its run, and its errors as sentences for users."""

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any
from urllib.parse import unquote

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from tasks.errors import TableInUse, WrongInput
from tasks.spark.gateway import jvm_is_alive
from tasks.stream.checkpoint import RESTART

logger = logging.getLogger("lakevision.stream")

WAIT_SECONDS = 0.5

GONE = (
    "DELTA_LOG_FILE_NOT_FOUND",  # and, as its first part, DELTA_LOG_FILE_NOT_FOUND_FOR_STREAMING_SOURCE
    "DELTA_MISSING_FILES_UNEXPECTED_VERSION",
    "DELTA_FILE_NOT_FOUND",
    "DELTA_TRUNCATED_TRANSACTION_LOG",
    "DELTA_VERSIONS_NOT_CONTIGUOUS",
)
"""Conditions of Delta that mean that a part of the log or of the feed was deleted."""

NO_FILE = ("FileNotFoundException", "FAILED_READ_FILE.FILE_NOT_EXIST")

BatchFunction = Callable[[DataFrame], None]
"""A function that processes the rows of one batch, in a thread of the query."""


class ColumnsChanged(RuntimeError):
    """Signal that the columns of the table changed while it was read, after which the query has to start again."""


def run_query(rows: DataFrame, process: BatchFunction, checkpoint: str, interval_seconds: int | None) -> None:
    """Process the rows of a streaming frame batch by batch, until all are processed that were there at the start.

    If this thread is interrupted, by a cancelled run or a time limit, the current batch is abandoned and the query is
    stopped before the interruption is raised. The next query with this checkpoint repeats that batch.

    Args:
        rows: The streaming frame.
        process: Processes the rows of a batch.
        checkpoint: Folder or URL of the checkpoint, which no other query uses.
        interval_seconds: Interval of the batches of a query without an end; None for a query that ends.

    Raises:
        Exception: That of `process`, or that of the query.
    """
    failures: list[BaseException] = []
    context = copy_context()  # The run's log and locks are in the context, which the query's thread does not inherit.

    def process_batch(batch: DataFrame, _number: int) -> None:
        try:
            context.run(process, batch)
        except BaseException as error:
            failures.append(error)  # Spark's own exception has only the text of this one.
            raise

    trigger: dict[str, Any] = {"availableNow": True}
    if interval_seconds is not None:
        trigger = {"processingTime": f"{interval_seconds} seconds"}
    writer = rows.writeStream.foreachBatch(process_batch).option("checkpointLocation", checkpoint).trigger(**trigger)
    try:
        query = writer.start()

        def wait() -> None:
            try:
                query.awaitTermination()
            except Exception as error:  # Raised again below, in the thread of the run.
                failures.append(error)

        # A signal is raised in this thread. In a call to the JVM, it would leave the connection without an answer.
        waiting = threading.Thread(target=wait, name="lakevision-stream", daemon=True)
        waiting.start()
        while waiting.is_alive():  # The time limit of a run in a thread is raised between two waits.
            waiting.join(WAIT_SECONDS)
    except BaseException:
        _stop_queries(rows.sparkSession)
        raise
    finally:
        # A batch has a session of its own; pyspark keeps that of the last `createDataFrame` for all threads.
        SparkSession._activeSession = rows.sparkSession
    if failures:
        raise failures[0]


def _stop_queries(spark: SparkSession) -> None:
    """Stop all queries of a session and wait for their threads; the connection of this thread may be unusable."""

    def stop() -> None:
        # A cancelled run's JVM gets the signal as well, and may end meanwhile.
        with suppress(Py4JError):
            for query in spark.streams.active:
                query.stop()

    if jvm_is_alive():
        stopper = threading.Thread(target=stop, name="lakevision-stream-stop")
        stopper.start()
        stopper.join()
        logger.info("the stream is stopped; the next run repeats the batch that was being processed")


def explain_failure(text: str, path: str, checkpoint: str) -> Exception | None:
    """Return the error that explains why a streaming query failed, or None for another reason.

    Args:
        text: Messages of the query's exception, with those of its causes.
        path: Path or URL of the source.
        checkpoint: Folder of the query's checkpoint.
    """
    folder = path.rstrip("/").rsplit("/", 1)[-1]
    named = text + unquote(text)  # Some messages have the path, others a URI.
    names_source = f"/{folder}/" in named
    # A batch also reads the table of predictions: a failure that names only another log is not about the source.
    logs = set(re.findall("([^/]+)/_delta_log", named))
    is_gone = any(condition in text for condition in GONE) and (not logs or folder in logs)
    if is_gone or (names_source and any(name in text for name in NO_FILE)):
        return WrongInput(
            f"changes of '{path}' that the stream has not read yet were deleted, by VACUUM or by the clean-up of the "
            "table's log",
            way_out=RESTART,
        )
    if "DELTA_MISSING_CHANGE_DATA" in text:
        return WrongInput(
            f"'{path}' had no change data feed for a part of the changes that the stream has not read yet",
            way_out=f"set delta.enableChangeDataFeed to true for the table, and {RESTART}",
        )
    if "DELTA_SCHEMA_CHANGED" in text:
        return ColumnsChanged(path)
    for condition, problem in (
        ("MALFORMED_LOG_FILE", f"the checkpoint '{checkpoint}' of the stream is damaged"),
        (
            "DELTA_STREAMING_TRAILING_COMMIT_MISSING",
            f"'{path}' has lost versions that the stream has read, as when an older copy takes its place",
        ),
    ):
        if condition in text:
            return WrongInput(problem, way_out=RESTART)
    if "CONCURRENT_STREAM_LOG_UPDATE" in text:
        return TableInUse(
            f"another driver runs the same stream, with the checkpoint '{checkpoint}'", way_out="run again later"
        )
    return None
