"""The early start of Spark's Python workers, beside what the driver and the JVM do before the first job needs them."""

from collections.abc import Iterable
from contextlib import suppress
from threading import Thread

import pandas as pd
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tasks.environment import PRELOAD
from tasks.spark.cluster import is_local


def preload(spark: SparkSession, module: str) -> None:
    """Start the daemon of the Python workers with a module that the functions of the next jobs need.

    It returns at once. Functions that were made before have other workers. On a cluster nothing is done, since an
    executor may lack this package when its daemon starts.

    Args:
        spark: The session.
        module: Name of the module. Its import must not start threads or CUDA, which a forked process would lack.
    """
    context = spark.sparkContext
    if not is_local(str(context.master)) or context.environment.get(PRELOAD) == module:
        return
    context.environment[PRELOAD] = module  # Spark has a daemon for each environment.
    nothing = spark.range(0, 1, 1, 1).mapInPandas(_same, "id long")

    def start() -> None:
        # Cancelled with the work that needs it; a daemon that cannot start fails the job of that work.
        with suppress(Py4JError, PySparkException, OSError):
            nothing.collect()

    Thread(target=start, name="lakevision-preload", daemon=True).start()


def _same(batches: Iterable[pd.DataFrame]) -> Iterable[pd.DataFrame]:
    return batches
