"""A Spark cluster: the DAG under spark-submit, two drivers at once, a killed executor."""

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tests.builders.killed_runs import read_contents
from tests.builders.processes import ROOT
from tests.builders.spark_cluster import SparkCluster, run_stages, start_cluster, submit
from tests.conftest import write_images

PER_CLASS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Start a cluster with a source in its shared folder."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), num_workers=2) as started:
        write_images(started.shared / "source", PER_CLASS, side=128)
        yield started


def executors(cluster: SparkCluster) -> list[psutil.Process]:
    """Return the running executors of the cluster."""
    found = []
    for process in psutil.process_iter():
        try:
            is_executor = "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
            if is_executor and process.cwd().startswith(str(cluster.shared.parent)):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(900)
def test_whole_dag_under_spark_submit(cluster: SparkCluster) -> None:
    """spark-submit's master and settings are used, and its JVM is left to it between and after the stages."""
    shared = cluster.shared / "submitted"
    options = {
        "etl.source": str(cluster.shared / "source"),
        "storage.home": str(cluster.private / "submitted"),
        "storage.tables": f"{shared}/tables",
        "storage.cache": f"{shared}/cache",
        "cache.image_size": "32",
        "train.model": "squeezenet1_1",
        "train.weights": "none",
        "train.freeze_backbone": "false",
        "train.max_epochs": "1",
        "train.batch_size": "8",
        "train.compile": "false",
        "distributed.where": "in_place",
        "distributed.num_ranks": "1",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]

    done = submit(cluster, str(ROOT / "flows" / "pipeline.py"), *words)

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((cluster.private / "submitted" / "summary.json").read_text())
    assert (summary["images"], summary["predictions"]) == (3 * PER_CLASS, 3 * PER_CLASS)
    assert f"'{cluster.master}' is used without" not in done.stderr
    assert executors(cluster) == []


@pytest.mark.timeout(900)
def test_two_drivers_at_once_leave_one_version_of_everything(cluster: SparkCluster) -> None:
    """Both drivers have an executor, and the lock of a table is that of its folder on this machine."""
    source = cluster.shared / "source"
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda home: run_stages(cluster, source, "both", home=home, num_cores=1), ("one", "two")))

    assert [run.returncode for run in ended] == [0, 0], [run.stderr for run in ended]
    reports = [json.loads(run.stdout.splitlines()[-1]) for run in ended]
    assert [len(report["session"]["executors"]) for report in reports] == [1, 1]
    assert sorted(report["built"] for report in reports) == [False, True]
    assert [report["etl"]["stored"] for report in reports] == [3 * PER_CLASS] * 2
    assert sorted(report["etl"]["changed"] for report in reports) == [False, True]
    assert sum(report["predicted"]["predicted"] for report in reports) == 3 * PER_CLASS


@pytest.mark.timeout(900)
def test_killed_executor_is_replaced_and_nothing_is_lost_or_doubled(cluster: SparkCluster) -> None:
    """Spark runs its tasks again on a new executor, which fetches jars and the model from the driver."""
    killed: list[int] = []
    stop = threading.Event()

    def kill_once() -> None:
        while not stop.wait(0.05):
            running = executors(cluster)
            if len(running) == 2 and any((cluster.shared / "killed").rglob("part-*")):
                time.sleep(0.5)
                running[0].send_signal(signal.SIGKILL)
                killed.append(running[0].pid)
                return

    killer = threading.Thread(target=kill_once)
    killer.start()
    try:
        done = run_stages(cluster, cluster.shared / "source", "killed")
    finally:
        stop.set()
        killer.join()

    assert len(killed) == 1
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["predicted"]["predicted"] == 3 * PER_CLASS
    contents = read_contents(resolve_storage(cluster.storage_config("killed")), CacheRef(**report["cache"]))
    assert len(contents.images) == 3 * PER_CLASS
    assert contents.duplicate_images() == []
    assert not list(Path(cluster.shared / "killed").rglob("_unfinished-*"))
