"""A driver that shares tables on a store with another: store_driver.py STAGE SOURCE HOME URL GO, STAGE etl or predict.

It prints `ready`, waits for the file GO, works, and prints the number of its attempts.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_source, prepare_ingest
from tasks.spark.session import keep_spark, spark_session
from tasks.storage import Storage
from tasks.tables.writer import TableChanged
from tests.builders.etl_tables import etl_settings
from tests.builders.store_run import make_storage
from tests.builders.untrained_model import predict

logger = logging.getLogger("lakevision.test")

SPARK = SparkConfig(driver_memory="1g")
MAX_ATTEMPTS = 5


def make_work(stage: str, source: Path, storage: Storage) -> Callable[[], object]:
    """Return the work of a stage, whose first attempt begins with a listing from before the other driver's work."""
    if stage == "predict":
        return lambda: predict(storage)
    etl = etl_settings(source)
    listed = [prepare_ingest(etl, storage, SPARK)]
    return lambda: ingest_source(etl, listed.pop() if listed else prepare_ingest(etl, storage, SPARK), storage, SPARK)


def attempts(work: Callable[[], object]) -> int:
    """Repeat the work while another driver's commits conflict with it, as a flow does; return how often it ran."""
    for attempt in range(1, MAX_ATTEMPTS):
        try:
            work()
            return attempt
        except TableChanged as error:
            logger.info("attempt %d: %s", attempt, error)
    work()
    return MAX_ATTEMPTS


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    stage_name, source_folder, home_folder, store_url, go = sys.argv[1:]
    with keep_spark():
        used = make_storage(Path(home_folder), store_url)
        with spark_session(SPARK, used):
            pass  # Started before the other driver works, so that both work at the same time.
        doing = make_work(stage_name, Path(source_folder), used)
        print("ready", flush=True)
        while not Path(go).exists():
            time.sleep(0.05)
        print(attempts(doing), flush=True)
