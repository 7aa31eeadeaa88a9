"""What a list of runs says of each, before it has trained."""

from collections.abc import Callable

import pytest
import torch

from tasks.cache.manifest import open_cache
from tasks.collectives import SingleProcess
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.model.network import build_classifier
from tasks.refs import CacheRef, TableRef
from tasks.storage import resolve_storage
from tasks.train.phases import TrainingContext
from tasks.train.results import run_config, run_name, run_tags, training_data
from tasks.train.spec import TrainingSpec

TRIAL, REPEAT = {"lakevision.trial": "3"}, {"lakevision.repeat_of": "abc"}


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """A cache of noise."""
    return make_cache({"train": 9, "val": 3, "test": 12})


def context_of(
    cache: CacheRef, table: TableRef | None = None, *, ranks: bool = False, tags: dict[str, str] | None = None
) -> TrainingContext:
    """Return the setting of a training on the cache, made from that table."""
    manifest = open_cache(cache)
    manifest = manifest.model_copy(update={"table": table or manifest.table})
    train = TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False)
    classifier = build_classifier("squeezenet1_1", "none", 3, freeze_backbone=False)
    distributed = DistributedConfig() if ranks else None
    storage = resolve_storage(StorageConfig(home="/home"))
    spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage, tags=tags or {})
    return TrainingContext(spec, manifest, classifier, torch.device("cpu"), SingleProcess())


def test_runs_are_called_after_what_is_special_about_them(cache: CacheRef) -> None:
    """So that the trials of a search are not twenty lines alike."""
    single, ranks = context_of(cache), context_of(cache, ranks=True)

    assert run_name(single) == "squeezenet1_1 16 px"
    assert run_name(ranks) == "squeezenet1_1 16 px, 1 ranks"
    assert run_name(context_of(cache, tags=TRIAL)) == "squeezenet1_1 16 px, trial 3"
    assert run_name(context_of(cache, tags=REPEAT)) == "squeezenet1_1 16 px, repeated"


def test_source_of_a_run_is_the_flow(cache: CacheRef) -> None:
    """And no file of ours that a rank happens to run; tags that are given win."""
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


def test_a_run_is_tagged_with_the_id_of_its_table(cache: CacheRef) -> None:
    """By which the table is known wherever it lies; a cache of an older version has none."""
    table = TableRef(path="/tables/images", version=3, table_id="a27e")

    assert run_tags(context_of(cache, table))["lakevision.table_id"] == "a27e"
    assert "lakevision.table_id" not in run_tags(context_of(cache))


def test_data_of_a_run_whose_table_is_gone_has_no_source(cache: CacheRef) -> None:
    """The cache is enough to train; everything that it knows is logged."""
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
