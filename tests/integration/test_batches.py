"""Flows refuse more ranks, parts of a step or drawn batches than the training split has, before a cache is built."""

from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from flows.decorator import DagFlow
from flows.train import train
from flows.train_distributed import train_distributed
from flows.train_trial import train_trial
from flows.tune import tune
from tasks.config.distributed import DistributedConfig, TrainDistributedRun
from tasks.config.frozen import FrozenConfig
from tasks.config.train import TrainConfig, TrainRun
from tasks.config.tune import Choices, TrialRun, TuneConfig, TuneRun
from tasks.errors import WrongInput
from tasks.storage import Storage


@pytest.fixture(autouse=True)
def _server(prefect_harness):
    """Run all tests of this module against the harness."""


FROM_SCRATCH = {"model": "squeezenet1_1", "weights": "none", "freeze_backbone": False}


@pytest.mark.parametrize(
    ("dag_flow", "config"),
    [
        (train, TrainRun(train=TrainConfig(**FROM_SCRATCH, accumulate_steps=1000))),
        (
            train_distributed,
            TrainDistributedRun(train=TrainConfig(**FROM_SCRATCH), distributed=DistributedConfig(num_ranks=1000)),
        ),
        (train_trial, TrialRun(train=TrainConfig(**FROM_SCRATCH, accumulate_steps=1000))),
        (
            tune,
            TuneRun(
                train=TrainConfig(**FROM_SCRATCH),
                tune=TuneConfig(search={"batch_size": Choices(choices=[8, 1000])}, where="in_place"),
            ),
        ),
    ],
    ids=lambda given: given.name if isinstance(given, DagFlow) else "",
)
def test_more_than_the_training_split_has_is_refused_before_a_cache_is_built(
    dag_flow: DagFlow[Any, Any], config: FrozenConfig, storage: Storage
) -> None:
    """The number of images of the split is read from the table."""
    splits = ["train"] * 45 + ["val", "test"] * 9
    deltalake.write_deltalake(storage.table("images"), pa.table({"split": splits}))
    with pytest.raises(WrongInput, match=r"(is|:) 1000\S* but the split 'train' has 45 images.* at most 45"):
        dag_flow(config.model_copy(update={"storage": storage.as_config()}))
    assert not Path(storage.cache).exists()
