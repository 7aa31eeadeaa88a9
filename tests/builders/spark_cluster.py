"""A Spark standalone cluster on this machine: a master and workers that do not see the driver's own files."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from tasks.config.storage import SparkConfig, StorageConfig
from tasks.spark.jvm import jars_folder
from tests.builders.processes import ROOT, plain_environment, run_python

START_SECONDS = 120
"""Timeout of the start of a master or a worker, in seconds."""

SPARK_HOME = Path(pyspark.__file__).parent

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options with which a JVM starts faster; more threads and a second compiler do not pay off in a minute."""

SMALL = {
    # The defaults are for large tables: hundreds of tasks for a few rows.
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.cores.max": "2",
}
"""Spark's settings for small tables and small executors."""

HIDE = 'for folder in $HIDDEN; do mount -t tmpfs tmpfs "$folder" || exit; done; exec "$@"'
"""Shell command that mounts an empty folder over each hidden one, in a mount namespace of its own."""


@dataclass(frozen=True)
class SparkCluster:
    """A running cluster.

    Attributes:
        master: URL of the master.
        shared: Folder that the driver and all workers see.
        private: Folder of the driver's home, temporary files and working folder.
        hides: Whether `private` and Delta's jars are invisible to the workers; it needs the right to mount.
        secret: Secret of the cluster, in the environment of all its processes.
    """

    master: str
    shared: Path
    private: Path
    hides: bool
    secret: str

    def storage_config(self, name: str = "run", home: str | None = None) -> StorageConfig:
        """Return a storage with a shared folder `name` for tables and cache, and a home that only the driver sees."""
        shared = self.shared / name
        return StorageConfig(
            home=str(self.private / (home or name)), tables=f"{shared}/tables", cache=f"{shared}/cache"
        )

    def spark_config(self, **conf: str) -> SparkConfig:
        """Return the settings of a session on the cluster."""
        return SparkConfig(
            master=self.master,
            driver_memory="512m",
            conf=SMALL
            | {"spark.driver.extraJavaOptions": f"{SHORT_LIVED} -Djava.io.tmpdir={self.private}/temp"}
            | conf,
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of a driver: the secret, and temporary folders that workers do not see."""
        temp = str(self.private / "temp")
        return plain_environment(_SPARK_AUTH_SECRET=self.secret, TMPDIR=temp, SPARK_LOCAL_DIRS=temp)


def can_mount() -> bool:
    """Return whether a process may have mounts of its own."""
    command = ["unshare", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def start_cluster(
    folder: Path, num_workers: int = 2, hidden: Sequence[Path] = (), variables: Mapping[str, str] | None = None
) -> Iterator[SparkCluster]:
    """Start a master and workers with one core each, and end them with the block.

    Args:
        folder: Empty folder for all files of the cluster.
        num_workers: Number of workers.
        hidden: More folders that the workers do not see.
        variables: Environment variables of workers and executors.
    """
    shared, private = folder / "shared", folder / "private"
    for path in (shared, private / "temp", private / "cwd"):
        path.mkdir(parents=True)
    hides, secret = can_mount(), secrets.token_hex(16)
    not_seen = [*map(str, hidden), str(private), str(jars_folder())] if hides else []
    with ExitStack() as stack:
        bind = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        log = stack.enter_context(_daemon(folder / "master", secret, [], {}, "master.Master", *bind))
        master = _wait_for(r"Starting Spark master at (spark://\S+)", log)
        for number in range(num_workers):
            work = folder / f"worker-{number}"
            arguments = (*bind, "--cores", "1", "--memory", "1g", "--work-dir", str(work / "work"), master)
            log = stack.enter_context(_daemon(work, secret, not_seen, variables or {}, "worker.Worker", *arguments))
            _wait_for(r"(Successfully registered) with master", log)
        yield SparkCluster(master, shared, private, hides, secret)


@contextmanager
def _daemon(
    folder: Path, secret: str, hidden: Sequence[str], variables: Mapping[str, str], name: str, *arguments: str
) -> Iterator[Path]:
    """Run a daemon of Spark in a folder of its own until the end of the block; yield its log."""
    (folder / "temp").mkdir(parents=True)
    options = "-Dspark.authenticate=true -Dspark.network.crypto.enabled=true -Dspark.master.rest.enabled=false"
    environment = {
        **variables,
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder / "temp"),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_DIRS": str(folder / "temp"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{options} {SHORT_LIVED} -Djava.io.tmpdir={folder}/temp",
        "_SPARK_AUTH_SECRET": secret,
        "HIDDEN": " ".join(hidden),
    } | {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    if hidden:
        command = ["unshare", "--mount", "sh", "-c", HIDE, "sh", *command]
    log = folder / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield log
        finally:
            process.terminate()


def _wait_for(pattern: str, log: Path) -> str:
    """Return the first group of a pattern once a daemon has logged it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"Spark did not start: {log.read_text()}")


def run_stages(
    cluster: SparkCluster,
    source: Path,
    name: str = "run",
    home: str | None = None,
    num_cores: int = 2,
) -> "subprocess.CompletedProcess[str]":
    """Run ETL, cache, inference and maintenance in a driver of its own, which prints its report as JSON.

    Args:
        cluster: The cluster.
        source: Folder with the images.
        name: Name of the shared folder of its tables and cache.
        home: Name of the driver's home; None for the same.
        num_cores: Number of the cluster's cores for this driver.
    """
    given = {
        "source": str(source),
        "storage": cluster.storage_config(name, home).model_dump(),
        "spark": cluster.spark_config(**{"spark.cores.max": str(num_cores)}).model_dump(),
    }
    arguments = ("-m", "tests.builders.cluster_stages", json.dumps(given))
    return run_python(*arguments, environment=cluster.environment(), timeout=800, cwd=cluster.private / "cwd")


def submit(cluster: SparkCluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a file with spark-submit, as a driver of the cluster."""
    temp = f"{SHORT_LIVED} -Djava.io.tmpdir={cluster.private}/temp"
    conf = [word for item in SMALL.items() for word in ("--conf", "=".join(item))]
    options = ("--master", cluster.master, "--driver-memory", "512m", "--driver-java-options", temp, *conf)
    return _spark_submit(*options, *arguments, environment=cluster.environment(), cwd=cluster.private / "cwd")


def submit_locally(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a file with spark-submit on this machine, with one core and three shuffle partitions."""
    options = ("--master", "local[1]", "--driver-memory", "512m", "--driver-java-options", SHORT_LIVED)
    conf = ("--conf", "spark.sql.shuffle.partitions=3")
    return _spark_submit(*options, *conf, *arguments, environment=plain_environment(), cwd=ROOT)


def _spark_submit(
    *arguments: str, environment: dict[str, str], cwd: Path, timeout: float = 800
) -> "subprocess.CompletedProcess[str]":
    pythons = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    return subprocess.run(
        [str(SPARK_HOME / "bin" / "spark-submit"), *arguments],
        cwd=cwd,
        env=environment | pythons,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
