"""One process in which a caller's session, threads and a forked process use Spark; it prints what each of them got."""

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.spark.session import keep_spark, spark_session
from tasks.storage import Storage, resolve_storage

ROWS = 1000


def two_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch twice."""
    for batch in batches:
        yield from (batch, batch)


def double_rows(session: SparkSession) -> int:
    """Return the number of rows of a job in the JVM and in Python workers, whose input is in Spark's folder."""
    numbers = session.sparkContext.broadcast(list(range(ROWS)))  # A file in the session's temporary folder.
    rows = session.createDataFrame([(number,) for number in numbers.value], "id long").repartition(4)
    return rows.mapInArrow(two_batches, "id long").count()


def use_spark(storage: Storage) -> int:
    """Use a session of a home, as a stage does."""
    with spark_session(SparkConfig(driver_memory="1g"), storage) as session:
        return double_rows(session)


def refused_session(storage: Storage) -> list[str]:
    """Return the errors for a caller's context and its session without Delta, and whether the session still works."""
    context = SparkContext("local[1]", conf=SparkConf().set("spark.ui.enabled", "false"))
    found = [refusal(storage)]
    context.range(3).count()
    session = SparkSession.builder.getOrCreate()
    found += [refusal(storage), str(session.range(3).count())]
    session.stop()
    return found


def refusal(storage: Storage) -> str:
    """Return the error with which the caller's session is refused."""
    try:
        use_spark(storage)
    except WrongInput as error:
        return str(error)
    return "accepted"


def in_child(queue: "multiprocessing.Queue[int]", storage: Storage) -> None:
    """Use Spark in a forked process."""
    queue.put(use_spark(storage))


async def in_threads(*storages: Storage) -> list[int]:
    """Use sessions of several homes from threads of an event loop."""
    return await asyncio.gather(*(asyncio.to_thread(use_spark, storage) for storage in storages))


def main(folder: Path) -> dict[str, object]:
    """Return the results of all users of Spark in this process."""
    one, other, third = (resolve_storage(StorageConfig(home=str(folder / name))) for name in ("one", "other", "third"))
    results: dict[str, object] = {"caller": refused_session(one)}
    with keep_spark():
        results["threads"] = asyncio.run(in_threads(one, other))
        context = multiprocessing.get_context("fork")
        queue: multiprocessing.Queue[int] = context.Queue()
        child = context.Process(target=in_child, args=(queue, third))
        child.start()
        results["child"] = queue.get(timeout=120)
        child.join()
        results["after"] = double_rows(SparkSession.active())
    results["stopped"] = SparkContext._active_spark_context is None and SparkContext._gateway is None
    return results


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
