"""Ranks on a Spark cluster, of which an executor, a worker or a process of a rank is killed."""

import json
import re

import mlflow
import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.launch.launcher import launch_ranks
from tasks.refs import RunRef
from tasks.storage import resolve_storage
from tasks.tracking.runs import RESTARTS_TAG
from tasks.train.spec import TrainingSpec
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_ranks_on_cluster import VICTIMS
from tests.builders.killed_training import logged_epochs, runs_beside
from tests.builders.processes import ROOT, rank_processes, run_python
from tests.builders.rank_cases import BACKENDS
from tests.builders.spark_cluster import start_cluster
from tests.builders.training_runs import ROUNDED, weights
from tests.conftest import write_images
from tests.faults.conftest import at_most

ROUNDS = at_most(6)
"""For each process that is killed, with the backends in turns: 24 in all."""

LAUNCH = """
import sys
from tasks.launch.launcher import launch_ranks
from tasks.train.spec import TrainingSpec

print(launch_ranks(TrainingSpec.model_validate_json(sys.argv[1])).run_id)
"""
"""Code that trains with the specification that is its argument, and prints the id of the MLflow run."""

TRAIN = ROUNDED.model_copy(update={"learning_rate": 1e-4, "batch_size": 2, "max_epochs": 20, "patience": 20})


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", VICTIMS)
def test_run_is_completed_after_the_loss_of_a_process(tmp_path, draw, victim):
    """In the same MLflow run, with the undisturbed weights and each epoch once; no process is left."""
    write_images(tmp_path / "source", 20)
    cache = hand_made_cache(tmp_path / "source", f"{tmp_path}/cache")
    other = resolve_storage(StorageConfig(home=str(tmp_path / "undisturbed")))
    local = DistributedConfig(num_ranks=2)
    undisturbed = launch_ranks(TrainingSpec(train=TRAIN, distributed=local, cache=cache, storage=other))
    expected = weights(undisturbed, other, tmp_path)
    for number in range(ROUNDS):
        # A cluster that has lost a worker does not start another.
        with start_cluster(tmp_path / f"cluster-{number}") as cluster:
            storage = resolve_storage(StorageConfig(home=str(cluster.shared / "home")))
            spec = TrainingSpec(
                train=TRAIN,
                distributed=DistributedConfig(
                    backend=BACKENDS[number % 2], num_ranks=2, min_ranks=1, max_restarts=3, launcher="spark"
                ),
                spark=cluster.spark_config(),
                cache=cache,
                storage=storage,
            )
            seed = str(draw.random())
            arguments = ("-m", "tests.builders.killed_ranks_on_cluster", spec.model_dump_json(), victim, seed)
            ended = run_python(*arguments, environment=cluster.environment(), timeout=900, cwd=cluster.private / "cwd")
            assert ended.returncode == 0, ended.stderr
            done = json.loads(ended.stdout.splitlines()[-1])
            print(f"round {number}: {done}")
            assert (done["rank"] is not None, done["left"]) == (True, 0)
            run = RunRef(run_id=done["run"])
            found = weights(run, storage, tmp_path)
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name
            # It began at 0: how far training has moved the weights.
            assert expected["network.features.0.bias"].abs().max() > 1e-5
            assert logged_epochs(run, storage) == list(range(TRAIN.max_epochs))
            assert runs_beside(run, storage) == [(run.run_id, "FINISHED")]
            tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
            assert int(tags[RESTARTS_TAG]) in (1, 2, 3)
    assert rank_processes(str(tmp_path)) == []


FAILS_FIRST = """
import os, sys, time

if "tasks.launch.host_agent" in sys.orig_argv:
    with open({folder!r} + "/started", "a") as started:
        print(os.getpid(), file=started)
    try:
        os.close(os.open({folder!r} + "/failed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        time.sleep(5)
        os._exit(1)
"""
"""A module that Python imports when a process starts: the first agent fails once the other has connected."""


FAILED_AT_START = (
    r"Spark has not started all agents \(the agent of rank \d ended with status 1\): the logs of its executors say why"
    r": restarting 2 ranks from the start \(restart 1 of 1\)"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_agent_that_fails_at_its_start_is_started_again(tmp_path, backend):
    """While the other one is connected: Spark ends the stage, and the launcher starts another one."""
    write_images(tmp_path / "source", 20)
    with start_cluster(tmp_path / "cluster") as cluster:
        cache = hand_made_cache(tmp_path / "source", f"{cluster.shared}/cache")
        site = cluster.shared / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(FAILS_FIRST.format(folder=str(site)))
        storage = resolve_storage(StorageConfig(home=str(cluster.shared / "home")))
        spec = TrainingSpec(
            train=TRAIN.model_copy(update={"max_epochs": 2}),
            distributed=DistributedConfig(backend=backend, num_ranks=2, max_restarts=1, launcher="spark"),
            spark=cluster.spark_config(**{"spark.executorEnv.PYTHONPATH": f"{site}:{ROOT}"}),
            cache=cache,
            storage=storage,
        )
        arguments = ("-c", LAUNCH, spec.model_dump_json())
        ended = run_python(*arguments, environment=cluster.environment(), timeout=600, cwd=cluster.private / "cwd")
        assert ended.returncode == 0, ended.stderr
        assert re.search(FAILED_AT_START, ended.stderr), ended.stderr
        run = RunRef(run_id=ended.stdout.splitlines()[-1])
        assert logged_epochs(run, storage) == [0, 1]
        assert runs_beside(run, storage) == [(run.run_id, "FINISHED")]
        tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
        assert tags[RESTARTS_TAG] == "1"
        assert len((site / "started").read_text().splitlines()) == 4
    assert rank_processes(str(tmp_path)) == []
