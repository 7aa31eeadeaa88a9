"""All Spark stages on a standalone cluster, whose executors see the shared folder only."""

import json
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
import pytest
import torch
import torchvision

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.ladder.steps import Ladder
from tasks.refs import CacheRef, RunRef
from tasks.storage import resolve_storage
from tasks.tracking.runs import RESTARTS_TAG
from tasks.train.spec import TrainingSpec
from tests.builders.etl_and_cache import make_storage
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_runs import read_contents, run_and_read
from tests.builders.killed_training import logged_epochs, runs_beside
from tests.builders.processes import ROOT, run_python
from tests.builders.spark_cluster import SparkCluster, run_stages, start_cluster, submit_locally
from tests.builders.training_runs import SMALL, weights
from tests.conftest import write_images

PER_CLASS = 10

EPOCHS = 8
"""Of a training run on the cluster, which loses a worker after the first one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Start a cluster with a source in its shared folder, and with a worker more than its sessions use."""
    folder = tmp_path_factory.mktemp("cluster")
    with start_cluster(folder, num_workers=3) as started:
        # Its port would take programs from anybody.
        assert "REST server" not in (folder / "master" / "log").read_text()
        write_images(started.shared / "source", PER_CLASS, side=128)
        yield started


@pytest.fixture(scope="module")
def done(cluster: SparkCluster) -> dict[str, Any]:
    """Return what one driver reported that ran ETL, cache, inference, both streams and maintenance."""
    finished = run_stages(cluster, cluster.shared / "source")
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_tables_and_cache_of_a_cluster_equal_those_of_this_machine(spark, cluster, done, tmp_path) -> None:
    """The number and the place of the executors change neither rows, nor splits, nor pixels."""
    storage = resolve_storage(cluster.storage_config())
    of_cluster = read_contents(storage, CacheRef(**done["cache"]))
    here = run_and_read(cluster.shared / "source", make_storage(tmp_path / "home"))
    assert len(here.images) == 3 * PER_CLASS
    assert of_cluster == here


def test_all_stages_ran_on_the_cluster(cluster, done) -> None:
    """ETL, cache, inference, streams and maintenance have their results, in one session with two executors."""
    assert (done["etl"]["stored"], done["built"]) == (3 * PER_CLASS, True)
    assert (done["predicted"]["predicted"], done["predicted"]["errors"]) == (3 * PER_CLASS, 0)
    of_table, of_folder = done["streams"]
    assert (of_table["predicted"], of_table["errors"], of_table["versions_behind"]) == (3 * PER_CLASS, 0, 0)
    assert (of_folder["predicted"], of_folder["batches"], of_folder["files_behind"]) == (3 * PER_CLASS, 2, 0)
    assert [Path(path).name for path in done["maintained"]] == ["images", "files", "predictions", "promotions"]
    assert (done["session"]["master"], done["session"]["slots"]) == (cluster.master, 2)
    assert done["jvm_is_alive"] is False


def test_executors_need_no_file_of_the_driver(cluster, done) -> None:
    """Jars, the model and functions travel over Spark's connections: no executor sees the driver's folders."""
    if not cluster.hides:
        pytest.skip("needs the right to mount, to hide the driver's files from the workers")
    executors = done["session"]["executors"]
    assert len(executors) == 2
    assert all("/worker-" in one["cwd"] for one in executors)
    assert [one["seen"] for one in executors] == [[], []]


def test_folders_of_the_driver_are_refused_before_work_starts(cluster, done) -> None:
    """Source, tables, cache and predictions that executors do not see are named; nothing is written for them."""
    if not cluster.hides:
        pytest.skip("needs the right to mount, to hide the driver's files from the workers")
    private = cluster.private / "run" / "private"
    names = [("source", "source"), ("storage.tables", "tables/images"), ("predict.predictions", "predictions")]
    for setting, name in names:
        (message,) = [text for text in done["refusals"] if text.startswith(f"{setting} is '{private / name}', which")]
        assert message.endswith("give a folder with the same path on the driver and on every executor, or a URL")
    assert done["refusals"][2].startswith(f"storage.cache is '{private}/cache/")
    assert [path.name for path in private.rglob("*.parquet")] == []
    assert [path.name for path in private.rglob(".lakevision*")] == []


def test_driver_is_authenticated_and_shows_its_secret_to_nobody(cluster, done) -> None:
    """The secret is in the environment only, and nothing listens beyond the master's network or shows a UI."""
    assert done["session"]["conf"] == {
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.driver.host": "127.0.0.1",
    }
    assert done["session"]["shows_secret"] == []
    assert done["session"]["ui"] is None
    assert done["session"]["listening"] == ["127.0.0.1"]
    assert cluster.secret not in (cluster.private / "run" / "logs" / "spark.log").read_text()


def test_master_of_the_test_refuses_a_client_without_the_secret(cluster) -> None:
    """The other tests therefore show that the driver has the secret: a request without a login is not deserialized."""
    endpoint, master = b"Master", urlsplit(cluster.master)
    message = struct.pack(">bbh", 0, 0, len(endpoint)) + endpoint + b"\xac\xed\x00\x05t\x00\x05hello"
    frame = struct.pack(">bqi", 3, 1, len(message)) + message
    with socket.create_connection((master.hostname, master.port), timeout=30) as connection:
        connection.sendall(struct.pack(">q", 8 + len(frame)) + frame)
        assert b"Expected SaslMessage" in connection.recv(4096)


@pytest.mark.fault
def test_ladder_climbs_to_ranks_on_the_executors(cluster) -> None:
    """Its sixth step is a training run by the launcher spark, with tables and caches that the executors see."""
    torch.manual_seed(1)
    weights_file, home = cluster.shared / "small.pt", str(cluster.shared / "ladder-home")
    torch.save(torchvision.models.get_model(SMALL.model, weights=None).state_dict(), weights_file)
    values = {
        "model": SMALL.model,
        "weights": str(weights_file),
        "image_size": 32,
        "source": str(cluster.shared / "source"),
        "etl": {"val_fraction": 0.2, "test_fraction": 0.2},
        "train": {"max_epochs": 1, "weight_decay": 0.0},
        "distributed": {"num_ranks": 2, "where": "in_place", "launcher": "spark"},
        "ladder": {"sample_fraction": 0.6, "cost_per_hour": 3600.0},
        "storage": cluster.storage_config("ladder", home=home).model_dump(),
        "spark": cluster.spark_config().model_dump(),
    }
    program = (
        "import sys; from flows.scaling_ladder import scaling_ladder; from tasks.config.pipeline import LadderRun; "
        "print(scaling_ladder(LadderRun.model_validate_json(sys.argv[1])).model_dump_json())"
    )
    finished = run_python(
        *("-c", program, json.dumps(values)),
        environment=cluster.environment() | {"LAKEVISION_HOME": str(cluster.private / "ladder"), "PYTHONPATH": ROOT},
        timeout=900,
        cwd=cluster.private / "cwd",
    )
    assert finished.returncode == 0, finished.stderr
    ladder = Ladder.model_validate_json(finished.stdout.splitlines()[-1])
    *_others, here, last = ladder.steps
    assert [step.left_out for step in ladder.steps] == [""] * 6
    assert (here.name, last.name) == ("2 ranks on this machine", "ranks by the launcher spark")
    assert (last.ranks, last.images) == (2, here.images)
    assert last.cost == pytest.approx(2 * last.seconds)
    assert last.speed_up == pytest.approx(here.seconds / last.seconds)
    assert last.seconds != here.seconds, "it is a training run of its own"
    runs = mlflow.MlflowClient(resolve_storage(StorageConfig(home=home)).tracking)
    trained = runs.search_runs([one.experiment_id for one in runs.search_experiments()], "attributes.status='FINISHED'")
    launchers = [
        run.data.params["distributed.launcher"] for run in trained if "distributed.launcher" in run.data.params
    ]
    assert sorted(launchers) == ["local", "spark"]


@pytest.mark.fault
def test_ranks_on_the_executors_train_as_on_this_machine(cluster, tmp_path) -> None:
    """Each rank is started by a task of the barrier stage, the weights are those of local ranks, and none is left.

    A worker is killed meanwhile, which is the last use of the cluster: the ranks restart on the two others.
    """
    write_images(cluster.shared / "sixty", 20)
    cache = hand_made_cache(cluster.shared / "sixty", f"{cluster.shared}/by-hand")
    storage, other = (
        resolve_storage(StorageConfig(home=str(cluster.shared / name))) for name in ("ranks", "local-ranks")
    )
    spec = TrainingSpec(
        train=SMALL.model_copy(update={"num_threads": 1, "max_epochs": EPOCHS, "patience": EPOCHS, "batch_size": 4}),
        distributed=DistributedConfig(num_ranks=2, max_restarts=3, launcher="spark"),
        spark=cluster.spark_config(),
        cache=cache,
        storage=storage,
    )
    local = spec.model_copy(update={"distributed": DistributedConfig(num_ranks=2), "spark": None, "storage": other})
    arguments = ("-m", "tests.builders.ranks_on_cluster", spec.model_dump_json(), local.model_dump_json())
    finished = run_python(*arguments, environment=cluster.environment(), timeout=900, cwd=cluster.private / "cwd")
    assert finished.returncode == 0, finished.stderr
    done = json.loads(finished.stdout.splitlines()[-1])
    assert len(done["parents"]) == 2
    assert all("tasks.launch.host_agent" in agent for agent, *_ in done["parents"])
    assert all("pyspark" in worker for _, worker, *_ in done["parents"])
    assert done["left"] == []
    run = RunRef(run_id=done["remote"])
    tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
    assert tags[RESTARTS_TAG] in {"1", "2", "3"}
    assert logged_epochs(run, storage) == list(range(EPOCHS))
    assert runs_beside(run, storage) == [(run.run_id, "FINISHED")]
    found = weights(run, storage, tmp_path)
    expected = weights(RunRef(run_id=done["local"]), other, tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.fault
def test_jvm_of_spark_submit_is_used_by_all_sessions_and_its_end_is_one_sentence(tmp_path) -> None:
    """Master and settings of spark-submit are used, and every session sends Delta's jars to its executors."""
    home, result = tmp_path / "home", tmp_path / "result.json"
    done = submit_locally(str(ROOT / "tests" / "builders" / "submitted_sessions.py"), str(home), str(result))
    assert done.returncode == -signal.SIGKILL, done.stderr  # the program kills its JVM
    deadline = time.monotonic() + 120
    while not result.exists():
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.1)
    found = json.loads(result.read_text())
    session = {"master": "local[1]", "partitions": "3", "has_delta": True}
    assert found["sessions"] == [session | {"jvm_is_alive": True}, session]
    assert found["message"] == "the JVM of spark-submit exited unexpectedly, see its output: submit again"
