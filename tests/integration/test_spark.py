"""Start of a Spark session, counts of its tasks, and messages of work that failed in it."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from zipimport import zipimporter

import pandas as pd
import psutil
import pytest
from pyspark import SparkContext
from pyspark.sql import functions as F

from tasks.config.storage import SparkConfig
from tasks.environment import PRELOAD
from tasks.errors import WrongInput
from tasks.progress import count
from tasks.progress.count import counted, listener
from tasks.spark.gateway import SparkFailed, shorten_exception
from tasks.spark.jvm import check_java, class_archive
from tasks.spark.session import preload, spark_session, try_without_spark
from tasks.spark.settings import check_callers_session
from tasks.spark.worker_log import WorkerCount, count_ended_tasks
from tests.builders.processes import ROOT, plain_environment, run_python
from tests.builders.shared_process import ROWS


def fail(batches):
    """Raise in a Python worker."""
    for batch in batches:
        raise ValueError("no such image")
        yield batch


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda spark: spark.range(1).mapInArrow(fail, "id long").collect(), "ValueError: no such image"),
        (lambda spark: spark.range(1).select("nothing").collect(), "nothing"),
        (lambda spark: spark.range(1).select(F.raise_error(F.lit("bad row"))).collect(), "bad row"),
    ],
    ids=["python worker", "analysis", "jvm"],
)
def test_failure_can_be_formatted_after_the_jvm_has_ended(spark, storage, monkeypatch, work, message):
    """Prefect formats an exception after the session has ended; those of pyspark would call the JVM then."""
    with pytest.raises(SparkFailed) as failed, spark_session(SparkConfig(), storage) as session:
        work(session)
    monkeypatch.setattr(SparkContext, "_jvm", None)
    assert message in str(failed.value)


def test_jobs_of_failed_work_are_cancelled(spark, storage):
    """A time limit ends the thread of the work; a kept session does not continue its job beside a retry."""
    tracker = spark.sparkContext.statusTracker()

    def work():
        spark.sparkContext.parallelize([600], 1).map(time.sleep).count()

    def fail_during_a_job(pool):
        jobs.append(pool.submit(work))
        wait_until(tracker.getActiveJobsIds)
        raise TimeoutError

    jobs = []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(TimeoutError), spark_session(SparkConfig(), storage):
            fail_during_a_job(pool)
        wait_until(lambda: not tracker.getActiveJobsIds())
        assert "cancelled" in str(jobs[0].exception(timeout=60))
    assert spark.range(3).count() == 3


def wait_until(condition):
    """Wait until a function returns a true value."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask_driver(spark, message: bytes) -> bytes:
    """Send the driver a request of an executor without a login, and return the beginning of the answer."""
    frame = struct.pack(">bqi", 3, 1, len(message)) + message  # RpcRequest number 1 of Spark's protocol
    with socket.create_connection(("127.0.0.1", int(spark.conf.get("spark.driver.port"))), timeout=30) as connection:
        connection.sendall(struct.pack(">q", 8 + len(frame)) + frame)
        return connection.recv(4096)


def test_driver_deserializes_no_object_of_an_unauthenticated_client(spark):
    """A driver without authentication deserializes any Java object that a local process sends to its port."""
    endpoint = b"HeartbeatReceiver"
    an_object = b"\xac\xed\x00\x05t\x00\x05hello"  # a string, as Java serializes it
    answer = ask_driver(spark, struct.pack(">bbh", 0, 0, len(endpoint)) + endpoint + an_object)
    assert b"Expected SaslMessage" in answer
    assert b"RpcFailure" not in answer  # the answer to an unknown object
    assert "spark.authenticate.secret" not in dict(spark.sparkContext.getConf().getAll())


CLOSED_SOCKET = """org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed once, \
most recent failure: Lost task 0.0 in stage 1.0 (TID 1) (127.0.0.1 executor driver): java.io.EOFException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:398)
\tat org.apache.spark.api.python.PythonWorkerFactory.createThroughDaemon(PythonWorkerFactory.scala:1)
"""


def test_open_session_is_used_at_once(spark, storage):
    """Work with an open session starts once, not first without a session."""
    given = []
    assert try_without_spark(lambda session: given.append(session) or "done", SparkConfig(), storage) == "done"
    assert given == [spark]


def test_ended_tasks_are_counted_without_lines_of_workers(spark, monkeypatch):
    """On a cluster, lines of workers do not reach the driver; here they name another driver."""
    monkeypatch.setattr(count, "UPDATE_SECONDS", 0.0)
    ended = count_ended_tasks(spark.sparkContext)

    def work(batches):
        of_task = WorkerCount("far", -1, ended)
        for batch in batches:
            of_task.add(batch.num_rows)
            yield batch
        of_task.close()

    heard = []
    with listener(heard.append), counted("far", 100):
        assert spark.range(40, numPartitions=4).mapInArrow(work, "id long").count() == 40
        deadline = time.monotonic() + 30
        while heard[-1].done < 40:
            assert time.monotonic() < deadline, heard
            time.sleep(0.1)
    assert [progress.done for progress in heard] == [0, 10, 20, 30, 40, 100]


def report_parent(batches):
    """Yield the parent process of a worker for each row, whether it has a module, and the archives it searches."""
    archives = [path for path, finder in sys.path_importer_cache.items() if isinstance(finder, zipimporter)]
    for batch in batches:
        is_imported = "wave" in sys.modules
        yield pd.DataFrame(
            {"parent": os.getppid(), "is_imported": is_imported, "archives": ",".join(archives)}, index=batch.index
        )


def test_workers_are_forked_from_one_process_that_has_imported_a_module(spark, monkeypatch):
    """The process that is started early is that of the next workers, whose tasks need not read Spark's archives."""
    monkeypatch.setitem(spark.sparkContext.environment, PRELOAD, "")
    preload(spark, "wave")
    preload(spark, "wave")
    columns = "parent long, is_imported boolean, archives string"
    rows = spark.range(0, 4, 1, 2).mapInPandas(report_parent, columns).distinct().collect()
    assert [(row["is_imported"], row["archives"]) for row in rows] == [(True, "")]
    started = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # It ended meanwhile.
            started += [process] if process.environ().get(PRELOAD) == "wave" else []
    assert {process.pid for process in started} & {process.ppid() for process in started} == {rows[0]["parent"]}


def test_closed_worker_socket_is_reported_as_a_killed_worker():
    """The JVM reports a closed socket or a missing process; the first lines of other exceptions stay as they are."""
    missing = "java.lang.IllegalStateException: Python daemon failed to launch worker."
    assert shorten_exception(CLOSED_SOCKET).startswith("a Python worker of Spark was killed")
    assert shorten_exception(missing).startswith("a Python worker of Spark was killed")
    assert shorten_exception(f"{missing[:-1]} with code -1") == f"{missing[:-1]} with code -1"
    assert shorten_exception(CLOSED_SOCKET).endswith("java.io.EOFException")
    assert shorten_exception("java.io.EOFException\n\tat org.apache.parquet.Reader") == "java.io.EOFException"


@pytest.mark.long
def test_threads_forks_and_a_callers_session_share_one_process(tmp_path):
    """Threads use Spark in turn, a fork has a JVM of its own, and a caller's session without Delta is refused alive."""
    done = run_python(
        "-m", "tests.builders.shared_process", str(tmp_path), environment=plain_environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    *refused, alive = results.pop("caller")
    for sentence in refused:
        assert sentence.startswith("the active Spark session lacks Delta's setting spark.sql.extensions: build it by")
    assert (len(refused), alive) == (2, "3")
    twice = 2 * ROWS
    assert results == {"threads": [twice, twice], "child": twice, "after": twice, "stopped": True}
    assert not [path for path in tmp_path.glob("*/spark-temp/*") if path.is_dir()]


def test_callers_session_needs_delta_and_workers_that_can_run_a_stage(spark, monkeypatch):
    """A session with Delta and this Python is accepted by any name of it, and one with another Python is not."""
    check_callers_session(spark)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(Path(sys.executable).with_name("python3")))
    check_callers_session(spark)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python3")
    with pytest.raises(WrongInput, match=r"run '/nowhere/python3', which cannot .*No such file.*: set PYSPARK_PYTHON"):
        check_callers_session(spark)
    monkeypatch.setattr("tasks.spark.settings.place_of_class", lambda name: None)
    with pytest.raises(WrongInput, match="lacks Delta's jars: build it by delta.configure_spark_with_delta_pip"):
        check_callers_session(spark)


STARTED = """
import sys
import time
from pathlib import Path
import tasks.spark.session
if len(sys.argv) > 2:
    tasks.spark.jvm.class_archive = lambda java: Path(sys.argv[2])
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.storage import resolve_storage
with tasks.spark.session.spark_session(SparkConfig(), resolve_storage(StorageConfig(home=sys.argv[1]))) as spark:
    runtime = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    print("options", *runtime.getInputArguments())
    print("rows", spark.range(3).count())
"""


REFUSED = """
import sys
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.spark.session import spark_session
from tasks.storage import resolve_storage
storage = resolve_storage(StorageConfig(home=sys.argv[1]))
settings = ("bindAddress", "203.0.113.7"), ("host", "no.invalid"), ("port", "80"), ("serializer", "org.no.Serializer")
for name, value in settings:
    conf = {f"spark.{name}" if name == "serializer" else f"spark.driver.{name}": value}
    if name == "bindAddress":
        conf["spark.sql.shuffle.partitions"] = "16"  # A number that is in the message, too.
    try:
        with spark_session(SparkConfig(conf=conf), storage):
            print("started")
    except WrongInput as error:
        print(error)
with spark_session(SparkConfig(), storage) as session:
    print("rows", session.range(3).count())
# Spark has replaced the class of its errors by now.
settings = ("driver.host", "no.invalid"), ("memory.fraction", "much"), ("serializer", "java.lang.String")
for name, value in settings:
    try:
        with spark_session(SparkConfig(conf={f"spark.{name}": value}), storage):
            print("started")
    except WrongInput as error:
        print(error)
"""


def test_session_with_settings_that_spark_cannot_use_is_refused_in_a_sentence(tmp_path):
    """The text is read while the JVM runs; another session starts afterwards, with a home that ASCII cannot name."""
    command = [sys.executable, "-c", REFUSED, str(tmp_path / "größe")]
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    address, host, port, serializer, rows, later_host, number, kind = done.stdout.splitlines()
    assert address.startswith("Spark does not start (java.net.BindException: ")
    assert address.endswith(": correct spark.driver.bindAddress '203.0.113.7'")
    assert host.endswith("java.net.UnknownHostException: no.invalid): correct spark.driver.host 'no.invalid'")
    assert port.endswith(": check spark.driver.port '80'")
    assert "ClassNotFoundException: org.no.Serializer): correct spark.serializer 'org.no.Serializer'" in serializer
    assert rows == "rows 3"
    assert later_host.endswith("java.net.UnknownHostException: no.invalid): correct spark.driver.host 'no.invalid'")
    assert number.endswith(": correct spark.memory.fraction 'much'")
    assert kind.endswith("correct spark.serializer 'java.lang.String'")


def start_session(home: Path, *archive: Path) -> str:
    """Start a session in its own process, and return its output and that of its JVM."""
    command = [sys.executable, "-c", STARTED, str(home), *map(str, archive)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + (home / "logs" / "spark.log").read_text()


def test_session_uses_the_class_archive(tmp_path):
    """The JVM maps the archive of `make setup`, and prints no warning."""
    archive = class_archive(check_java())
    if not archive.exists():
        pytest.skip("needs the archive of classes that `make setup` writes")
    output = start_session(tmp_path)
    assert f"-XX:SharedArchiveFile={archive}" in output
    assert "rows 3" in output
    assert "[cds" not in output


def test_invalid_class_archive_is_ignored(tmp_path):
    """With an archive of another JVM or an incomplete one, the session starts without it and prints no warning."""
    archive = tmp_path / "classes.jsa"
    archive.write_bytes(b"no archive" * 1000)
    output = start_session(tmp_path / "home", archive)
    assert f"-XX:SharedArchiveFile={archive}" in output
    assert "rows 3" in output
    assert "[cds" not in output
