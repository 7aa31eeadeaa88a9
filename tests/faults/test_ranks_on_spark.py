"""Ranks on a Spark cluster, of which an executor, a worker or a process of a rank is killed."""

import json

import mlflow
import pytest
import torch

from tasks import tracking
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.launch.launcher import launch_ranks
from tasks.refs import RunRef
from tasks.storage import resolve_storage
from tasks.train.spec import TrainingSpec
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_ranks_on_cluster import VICTIMS
from tests.builders.killed_training import logged_epochs, runs_beside
from tests.builders.processes import rank_processes, run_python
from tests.builders.rank_cases import BACKENDS
from tests.builders.spark_cluster import start_cluster
from tests.builders.training_runs import ROUNDED, weights
from tests.conftest import write_images

ROUNDS = 6
"""For each process that is killed, with the backends in turns."""

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
            assert int(tags[tracking.RESTARTS_TAG]) in (1, 2, 3)
    assert rank_processes(str(tmp_path)) == []
