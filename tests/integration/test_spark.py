"""How a session starts, and what a person reads of work that failed in Spark."""

import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import functions as F

from tasks.config.storage import SparkConfig
from tasks.progress import count
from tasks.progress.count import counted, heard_by
from tasks.spark.failure import SparkFailed, shorten_exception
from tasks.spark.jvm import check_java, class_archive
from tasks.spark.progress import count_ended_tasks
from tasks.spark.session import spark_session, without_spark_first
from tasks.spark.worker_log import WorkerCount
from tests.builders.processes import ROOT


def fail(batches):
    """Raise in a Python worker."""
    for batch in batches:
        raise ValueError("no such image")
        yield batch


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda spark: spark.range(1).mapInArrow(fail, "id long").collect(), "ValueError: no such image"),
        (lambda spark: spark.range(1).select("nothing").collect(), "nothing"),
        (lambda spark: spark.range(1).select(F.raise_error(F.lit("bad row"))).collect(), "bad row"),
    ],
    ids=["python worker", "analysis", "jvm"],
)
def test_a_failure_can_be_read_when_the_jvm_is_gone(spark, storage, monkeypatch, work, said):
    """Prefect formats an exception after the session has ended; pyspark's own would ask the JVM then."""
    with pytest.raises(SparkFailed) as failed, spark_session(SparkConfig(), storage) as session:
        work(session)
    monkeypatch.setattr(SparkContext, "_jvm", None)
    assert said in str(failed.value)


def ask_driver(spark, message: bytes) -> bytes:
    """Send the driver a request as an executor sends it, but without a login; return the beginning of the answer."""
    frame = struct.pack(">bqi", 3, 1, len(message)) + message  # RpcRequest number 1 of Spark's protocol
    with socket.create_connection(("127.0.0.1", int(spark.conf.get("spark.driver.port"))), timeout=30) as connection:
        connection.sendall(struct.pack(">q", 8 + len(frame)) + frame)
        return connection.recv(4096)


def test_the_driver_reads_no_object_of_another_user(spark):
    """Without authentication it deserializes any Java object that a process of this machine sends to its port."""
    endpoint = b"HeartbeatReceiver"
    an_object = b"\xac\xed\x00\x05t\x00\x05hello"  # a string, as Java serializes it
    answer = ask_driver(spark, struct.pack(">bbh", 0, 0, len(endpoint)) + endpoint + an_object)
    assert b"Expected SaslMessage" in answer
    assert b"RpcFailure" not in answer  # how the endpoint answers an object that it does not know
    assert "spark.authenticate.secret" not in dict(spark.sparkContext.getConf().getAll())


CLOSED_SOCKET = """org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed once, \
most recent failure: Lost task 0.0 in stage 1.0 (TID 1) (127.0.0.1 executor driver): java.io.EOFException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:398)
\tat org.apache.spark.api.python.PythonWorkerFactory.createThroughDaemon(PythonWorkerFactory.scala:1)
"""


def test_a_session_that_is_open_is_used_at_once(spark, storage):
    """Without it the work would be begun, given up and begun again."""
    given = []
    assert without_spark_first(lambda session: given.append(session) or "done", SparkConfig(), storage) == "done"
    assert given == [spark]


def test_tasks_that_end_are_counted_where_no_line_of_a_worker_arrives(spark, monkeypatch):
    """As on a cluster, whose workers write elsewhere: their lines here name another driver."""
    monkeypatch.setattr(count, "TELL_SECONDS", 0.0)
    ended = count_ended_tasks(spark.sparkContext)

    def work(batches):
        of_task = WorkerCount("far", -1, ended)
        for batch in batches:
            of_task.add(batch.num_rows)
            yield batch
        of_task.close()

    heard = []
    with heard_by(heard.append), counted("far", 100):
        assert spark.range(40, numPartitions=4).mapInArrow(work, "id long").count() == 40
        deadline = time.monotonic() + 30
        while heard[-1].done < 40:
            assert time.monotonic() < deadline, heard
            time.sleep(0.1)
    assert [standing.done for standing in heard] == [0, 10, 20, 30, 40, 100]


def test_a_worker_killed_before_it_spoke_is_called_so():
    """The JVM says that a socket was closed; of another exception the first lines stay as they are."""
    assert shorten_exception(CLOSED_SOCKET).startswith("a Python worker of Spark was killed")
    assert shorten_exception(CLOSED_SOCKET).endswith("java.io.EOFException")
    assert shorten_exception("java.io.EOFException\n\tat org.apache.parquet.Reader") == "java.io.EOFException"


STARTED = """
import sys
import time
from pathlib import Path
import tasks.spark.session
if len(sys.argv) > 2:
    tasks.spark.jvm.class_archive = lambda java: Path(sys.argv[2])
from tasks.config import SparkConfig, StorageConfig
from tasks.storage import resolve_storage
with tasks.spark.session.spark_session(SparkConfig(), resolve_storage(StorageConfig(home=sys.argv[1]))) as spark:
    runtime = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    print("options", *runtime.getInputArguments())
    print("rows", spark.range(3).count())
"""


def start_session(home: Path, *archive: Path) -> str:
    """Start a session in a process of its own; return what it and its JVM printed."""
    command = [sys.executable, "-c", STARTED, str(home), *map(str, archive)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + (home / "logs" / "spark.log").read_text()


def test_a_session_starts_from_the_archive_that_set_up_wrote(tmp_path):
    """The JVM maps it, and says nothing of it."""
    archive = class_archive(check_java())
    if not archive.exists():
        pytest.skip("needs the archive of classes that `make setup` writes")
    said = start_session(tmp_path)
    assert f"-XX:SharedArchiveFile={archive}" in said
    assert "rows 3" in said
    assert "[cds" not in said


def test_an_archive_that_the_jvm_cannot_use_is_ignored(tmp_path):
    """Of another JVM, or half of one: the session starts without, and says nothing of it."""
    archive = tmp_path / "classes.jsa"
    archive.write_bytes(b"no archive" * 1000)
    said = start_session(tmp_path / "home", archive)
    assert f"-XX:SharedArchiveFile={archive}" in said
    assert "rows 3" in said
    assert "[cds" not in said
