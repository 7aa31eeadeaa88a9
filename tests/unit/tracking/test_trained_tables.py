"""Test of the table tags of a registered model, which come from the parameters of its training run."""

from types import SimpleNamespace
from typing import cast

import torch

from tasks.cache.manifest import CacheManifest
from tasks.config.cache import CacheConfig
from tasks.config.frozen import flat_params
from tasks.config.train import TrainConfig
from tasks.refs import CacheRef, TableRef
from tasks.tracking.trained_tables import table_tags
from tasks.train.context import TrainingContext
from tasks.train.results import run_config, training_data


def test_table_tags_come_from_the_parameters_of_the_run() -> None:
    """The table's id is among them, so that the table is recognized after its home moved or the run was purged."""
    table = TableRef(path="/home/tables/images", version=3, table_id="5c7e")
    manifest = CacheManifest(
        format=2, table=table, content_digest="", settings=CacheConfig(image_size=32), classes=("a", "b"), splits={}
    )
    context = SimpleNamespace(
        spec=SimpleNamespace(
            train=TrainConfig(weights="none", freeze_backbone=False),
            distributed=None,
            cache=CacheRef(url="/cache", digest="d"),
        ),
        manifest=manifest,
        ranks=SimpleNamespace(num_virtual=1),
        device=torch.device("cpu"),
        precision=torch.float32,
    )
    config = run_config(cast("TrainingContext", context), training_data(cast("TrainingContext", context)))
    params = {name: str(value) for name, value in flat_params(config).items()}
    assert table_tags(params) == {
        "lakevision.table": "/home/tables/images",
        "lakevision.table_version": "3",
        "lakevision.table_id": "5c7e",
    }
    assert table_tags({}) == {}
