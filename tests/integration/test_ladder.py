"""The flow `scaling-ladder` under Prefect's test harness."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.scaling_ladder import scaling_ladder
from tasks.config.pipeline import LadderRun
from tests.builders.small_network import SMALL


@pytest.mark.long
def test_flow_climbs_from_a_sample_to_ranks_and_says_what_each_step_gains(
    prefect_harness, storage, source, tmp_path, caplog
):
    """Each step computes its own features, and a second run finds the training runs of the first."""
    caplog.set_level("INFO")
    torch.manual_seed(1)
    weights = tmp_path / "small.pt"
    torch.save(torchvision.models.get_model(SMALL, weights=None).state_dict(), weights)
    values = {
        "model": SMALL,
        "weights": str(weights),
        "image_size": 32,
        "source": str(source),
        "etl": {"val_fraction": 0.2, "test_fraction": 0.2},
        "train": {"max_epochs": 1, "weight_decay": 0.0},
        "distributed": {"num_ranks": 2, "where": "in_place"},
        "ladder": {"sample_fraction": 0.6, "cost_per_hour": 3600.0},
        "storage": {"home": storage.home},
    }
    config = LadderRun.model_validate(values)

    found = scaling_ladder(config)

    *ran, last = found.steps
    for number in range(1, 6):
        assert re.search(rf"step-{number}/\w+: running the frozen backbone over", caplog.text)
    assert not list(Path(storage.cache).glob("step-*"))
    assert "spark.master 'local[*]'" in last.left_out
    assert [step.ranks for step in ran] == [1, 1, 1, 1, 2]
    small, whole = ran[0].images, ran[3].images
    assert [step.images for step in ran] == [small] * 3 + [whole] * 2
    assert small < whole
    for step in ran:
        assert step.seconds
        assert step.cost == pytest.approx(step.seconds)
        assert step.utilisation is not None
        assert step.images_per_second
    assert [step.speed_up is None for step in ran] == [True] + [False] * 4
    with get_client(sync_client=True) as client:
        (page,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["scaling-ladder"])))
    assert page.data.startswith(f"# Next: {found.advice}")
    assert scaling_ladder(config) == found
