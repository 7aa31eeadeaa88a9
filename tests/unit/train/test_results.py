"""Name, tags and parameters of an MLflow run at its start."""

from collections.abc import Callable

import pytest
import torch

from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer
from tasks.config.augmentation import AugmentationConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.model.training_network import build_classifier
from tasks.refs import CacheRef, TableRef
from tasks.storage import resolve_storage
from tasks.train.context import TrainingContext
from tasks.train.results import chosen_settings, run_config, run_name, run_tags, training_data
from tasks.train.spec import TrainingSpec

TRIAL, REPEAT = {"lakevision.trial": "3"}, {"lakevision.repeat_of": "abc"}


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Return a cache of noise."""
    return make_cache({"train": 9, "val": 3, "test": 12})


def context_of(
    cache: CacheRef, table: TableRef | None = None, *, ranks: bool = False, tags: dict[str, str] | None = None
) -> TrainingContext:
    """Return the context of a training run on the cache, with the given table in its manifest."""
    manifest = open_cache(cache)
    manifest = manifest.model_copy(update={"table": table or manifest.table})
    train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False)
    classifier = build_classifier("squeezenet1_1", "none", 3, freeze_backbone=False)
    distributed = DistributedConfig() if ranks else None
    storage = resolve_storage(StorageConfig(home="/home"))
    spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage, tags=tags or {})
    return TrainingContext(spec, manifest, classifier, torch.device("cpu"), Reducer())


def test_run_name_has_ranks_trial_or_repetition(cache: CacheRef) -> None:
    """Names distinguish the trials of a search, repetitions and distributed runs."""
    single, ranks = context_of(cache), context_of(cache, ranks=True)

    assert run_name(single) == "squeezenet1_1 16 px, from scratch"
    assert run_name(ranks) == "squeezenet1_1 16 px, 2 ranks, from scratch"
    assert run_name(context_of(cache, tags=TRIAL)) == "squeezenet1_1 16 px, trial 3, from scratch"
    assert run_name(context_of(cache, tags=REPEAT)) == "squeezenet1_1 16 px, repeated, from scratch"


def test_run_name_has_the_settings_that_differ_from_the_defaults() -> None:
    """Two runs of one network have names that say what differs; where a run computes and when it ends is left out."""
    assert chosen_settings(TrainConfig(device="cpu", num_threads=2, timeout_seconds=9)) == []
    assert chosen_settings(TrainConfig(batch_size=16, seed=7)) == ["batch_size 16", "seed 7"]
    assert chosen_settings(TrainConfig(weights="/my/net.pth", augmentation=AugmentationConfig(flip=True))) == [
        "weights net.pth",
        "augmentation.flip true",
    ]
    phases = [FineTunePhase(unfreeze_from="features.14"), FineTunePhase(unfreeze_from="all")]
    assert chosen_settings(TrainConfig(fine_tune=phases)) == ["fine_tune features.14 then all"]


def test_source_of_a_run_is_its_flow(cache: CacheRef) -> None:
    """The source tag is the flow and not the script of the rank; given tags take precedence."""
    sources = [
        run_tags(context_of(cache, ranks=ranks, tags=tags))["mlflow.source.name"]
        for ranks, tags in (
            (False, {}),
            (True, {}),
            (False, TRIAL),
            (False, REPEAT),
            (False, {"mlflow.source.name": "x"}),
        )
    ]

    assert sources == ["flows.train", "flows.train_distributed", "flows.tune", "flows.repeat", "x"]


def test_run_is_tagged_with_the_id_of_its_table(cache: CacheRef) -> None:
    """The tag is missing only for a cache of an older version, which has no table id."""
    table = TableRef(path="/tables/images", version=3, table_id="a27e")

    assert run_tags(context_of(cache, table))["lakevision.table_id"] == "a27e"
    assert "lakevision.table_id" not in run_tags(context_of(cache))


def test_data_of_a_run_with_a_deleted_table_has_no_source(cache: CacheRef) -> None:
    """A run needs only the cache, and everything known from the cache is logged."""
    context = context_of(cache)
    data = training_data(context)

    assert (data.source, data.content_digest, data.rows) == (None, "content", {"train": 9, "val": 3, "test": 12})
    assert run_config(context, data)["data"] == {
        "table": "/tables/images",
        "version": 3,
        "table_id": "",
        "content_digest": "content",
        "source": "",
        "rows": {"train": 9, "val": 3, "test": 12},
    }
