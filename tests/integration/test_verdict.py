"""The flow `verdict` and the stage of the DAG, under Prefect's test harness."""

from pathlib import Path

import torch
import torchvision
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.verdict import verdict
from tasks.cache.task import materialize
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.pipeline import VerdictRun
from tasks.config.storage import SparkConfig
from tasks.config.submitted import SingleConfig
from tasks.config.train import TrainConfig
from tasks.etl.task import choose_images
from tasks.verdict.task import give_verdict
from tests.builders.small_network import SMALL
from tests.builders.untrained_model import log_run


def test_flow_publishes_a_verdict_that_a_second_run_finds(prefect_harness, spark, storage, source, tmp_path):
    """The result of the same cache is cached whatever the learning rate is; a run's model is fetched first."""
    torch.manual_seed(1)
    weights = tmp_path / "small.pt"
    torch.save(torchvision.models.get_model(SMALL, weights=None).state_dict(), weights)
    network = {"model": SMALL, "weights": str(weights), "image_size": 32}
    etl = {"source": str(source), "val_fraction": 0.2, "test_fraction": 0.2}
    config = VerdictRun.model_validate({**network, "etl": etl, "storage": {"home": storage.home}})

    found = verdict(config)

    assert found.line.startswith("expected test accuracy 0.")
    assert len(found.weakest) == 3
    with get_client(sync_client=True) as client:
        (page,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["verdict"])))
    assert page.data.startswith(f"# Verdict: {found.line}")
    assert "## Classes that will be confused" in page.data

    images = choose_images(None, storage, SparkConfig())
    cache = materialize(CacheConfig(image_size=32), images, storage, SparkConfig())
    other_rate = TrainConfig(model=SMALL, weights=str(weights), learning_rate=0.01)
    again = give_verdict(other_rate, cache, storage, return_state=True)
    assert (again.name, again.result()) == ("Cached", found)
    assert not list(Path(storage.home).glob("checkpoints/*"))  # nothing was trained

    from_scratch = TrainConfig(model=SMALL, weights=str(weights), recipe="scratch")
    assert give_verdict(from_scratch, cache, storage).line.startswith("none: training has no cached features")

    run = log_run(storage, tmp_path, seed=1, accuracy=0.6)
    of_run = {**network, "model": "squeezenet1_1", "weights": run.run_id, "etl": etl, "storage": {"home": storage.home}}
    assert verdict(VerdictRun.model_validate(of_run)).line.startswith("none: the head of 'squeezenet1_1'")

    ranks = DistributedConfig(launcher="hosts", hosts="a:1,b:1", num_ranks=2)
    elsewhere = give_verdict(other_rate, cache, storage, SingleConfig(where="work_pool"), ranks)
    assert (elsewhere.line.split(":")[0], elsewhere.accuracy) == ("none", None)
