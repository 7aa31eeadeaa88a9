"""ETL, cache, inference, both streams and maintenance in one driver of a Spark cluster: cluster_stages.py SETTINGS."""

import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.cache.materialize import materialize_cache
from tasks.config.maintenance import MaintainConfig
from tasks.config.prediction import PredictConfig, StreamConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.maintenance.maintain import maintain_tables
from tasks.predict.batch import predict_batch
from tasks.refs import TableRef
from tasks.registry.promote import promote_best
from tasks.spark.cluster import num_task_slots
from tasks.spark.gateway import jvm_is_alive
from tasks.spark.session import keep_spark, spark_session
from tasks.storage import Storage, resolve_storage
from tasks.stream.predict import predict_stream
from tests.builders.etl_and_cache import CACHE, settings
from tests.builders.untrained_model import log_run


def look_around(spark: SparkSession, paths: list[str]) -> list[dict[str, Any]]:
    """Return, for each executor, its working folder and those of the paths that it sees with content."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _batch in batches:
            seen = [path for path in paths if os.path.isdir(path) and os.listdir(path)]
            yield pa.RecordBatch.from_pylist([{"cwd": os.getcwd(), "seen": seen}])

    rows = spark.range(0, 8, numPartitions=8).mapInArrow(look, "cwd string, seen array<string>")  # type: ignore[arg-type]  # an iterator in, as documented
    return [row.asDict() for row in rows.distinct().collect()]


def commands_with(text: str) -> list[str]:
    """Return the names of the processes whose command line has a text in it."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(text in word for word in process.cmdline()):
                found.append(process.name())
        except psutil.Error:
            continue
    return found


def listening(process: psutil.Process) -> set[str]:
    """Return the addresses on which a process and its children listen."""
    found = set()
    for each in (process, *process.children(recursive=True)):
        connections = each.net_connections(kind="inet")
        found |= {one.laddr.ip.removeprefix("::ffff:") for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def refusal(work: Callable[[], object]) -> str:
    """Return the message with which work is refused, an empty text if it is not."""
    try:
        work()
    except WrongInput as error:
        return str(error)
    return ""


def refusals_of_private_folders(source: Path, images: TableRef, storage: Storage, config: SparkConfig) -> list[str]:
    """Return the messages of stages that are given folders of the driver: source, tables, cache, predictions."""
    home = Path(storage.home) / "private"
    shutil.copytree(source, home / "source")
    other = storage.model_copy(update={"tables": f"{storage.tables}-of-private-source"})
    private = storage.model_copy(update={"tables": f"{home}/tables", "cache": f"{home}/cache"})
    predict = PredictConfig(predictions=f"{home}/predictions")
    return [
        refusal(lambda: ingest_images(settings(home / "source"), other, config)),
        refusal(lambda: ingest_images(settings(source), private, config)),
        refusal(lambda: materialize_cache(CACHE, images, private, config)),
        refusal(lambda: predict_batch(predict, PromoteConfig(), storage, config)),
    ]


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Run all stages in one session; return their reports and what the session was like."""
    source, storage = Path(given["source"]), resolve_storage(StorageConfig(**given["storage"]))
    spark_config = SparkConfig(**given["spark"])
    with keep_spark():
        etl = ingest_images(settings(source), storage, spark_config)
        cache, built = materialize_cache(CACHE, etl.images, storage, spark_config)
        model = log_run(storage, Path(tempfile.mkdtemp()), seed=1, accuracy=0.5, cache=cache)
        champion = promote_best([model], PromoteConfig(), storage).champion
        predicted = predict_batch(PredictConfig(batch_size=8), PromoteConfig(), storage, spark_config)
        streams = [
            predict_stream(
                StreamConfig(max_files_per_batch=files),
                PredictConfig(batch_size=8, source=given_source, predictions=f"{storage.tables}/{name}/predictions"),
                PromoteConfig(),
                storage,
                spark_config,
            )
            for name, files, given_source in (("of-table", 1000, None), ("of-folder", 20, str(source)))
        ]
        # Of two drivers at once, each has a tracking server of its own.
        maintained = maintain_tables(MaintainConfig(trust_tracking=True), storage, spark_config)
        refusals = refusals_of_private_folders(source, etl.images, storage, spark_config)
        with spark_session(spark_config, storage) as spark:
            context = spark.sparkContext
            driver_only = [storage.home, tempfile.gettempdir(), str(context._temp_dir)]
            session = {
                "master": context.master,
                "slots": num_task_slots(spark),
                "executors": look_around(spark, driver_only),
                "ui": context.uiWebUrl,
                "host": socket.gethostname(),
                "listening": sorted(listening(psutil.Process())),
                "shows_secret": commands_with(os.environ["_SPARK_AUTH_SECRET"]),
                "conf": {
                    name: context.getConf().get(name)
                    for name in ("spark.authenticate", "spark.network.crypto.enabled", "spark.driver.host")
                },
            }
    return {
        "etl": etl.model_dump(),
        "cache": cache.model_dump(),
        "built": built,
        "champion": champion.model_dump() if champion else None,
        "predicted": predicted.model_dump(mode="json"),
        "streams": [report.model_dump(mode="json") for report in streams],
        "maintained": [table.table.path for table in maintained.tables],
        "refusals": refusals,
        "session": session,
        "jvm_is_alive": jvm_is_alive(),
    }


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lakevision").setLevel(logging.INFO)
    print(json.dumps(run(json.loads(sys.argv[1]))))
