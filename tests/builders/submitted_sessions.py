"""Two sessions under spark-submit, whose JVM is killed in the second one: submitted_sessions.py HOME RESULT."""

import json
import os
import signal
import sys
from pathlib import Path

from tasks.config.storage import SparkConfig, StorageConfig
from tasks.spark.gateway import SparkFailed, jvm_is_alive
from tasks.spark.session import spark_session
from tasks.storage import resolve_storage


def main(home: str, result: Path) -> None:
    """Write what the sessions were like as JSON, once both have ended."""
    storage, sessions, config, message = resolve_storage(StorageConfig(home=home)), [], SparkConfig(), ""
    try:
        for number in range(2):
            with spark_session(config, storage) as spark:
                spark.range(3).write.format("delta").save(f"{home}/table-{number}")
                jars = spark.sparkContext._jsc.sc().listJars().mkString(",")
                sessions.append(
                    {
                        "master": spark.sparkContext.master,
                        "partitions": spark.conf.get("spark.sql.shuffle.partitions"),
                        "has_delta": "delta-spark" in jars,
                    }
                )
                if number == 1:
                    os.kill(os.getppid(), signal.SIGKILL)  # the JVM of spark-submit starts this process
                    spark.range(3).count()
            sessions[-1]["jvm_is_alive"] = jvm_is_alive()
    except SparkFailed as failed:
        message = str(failed)
    whole = result.with_suffix(".part")
    whole.write_text(json.dumps({"sessions": sessions, "message": message}))
    whole.rename(result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
