"""Homes whose MLflow database has a run, a champion, a search and a data validation, made without training."""

import json
from pathlib import Path

from tasks.model_package.description import FILE_LIMITS
from tasks.refs import ModelRef, RunRef, TableRef
from tasks.storage import Storage
from tasks.tracking.evaluated import evaluated_version
from tasks.tracking.models import register_run, set_alias, tag_version
from tasks.tracking.runs import log_data_checks
from tasks.tracking.searches import parent_run
from tasks.tracking.server import client_of
from tasks.tracking.tracked_run import TrainingData, tracked_run
from tasks.tracking.trained import logged_training
from tasks.tracking.trained_tables import serving_tags, trained_versions

CARD = "model_card.md"


def log_champion(storage: Storage, scratch: Path) -> ModelRef:
    """Log a run on the table `images` of a home as training and promotion do, with any files as its model."""
    folder = scratch / "package"
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILE_LIMITS:
        (folder / name).write_text(f"{name} of the model")
    table = TableRef(path=storage.table("images"), version=3, table_id="a27e", source=f"{storage.home}/photos")
    config = {
        "data": {"table": table.path, "version": 3, "table_id": "a27e", "source": table.source},
        "cache": {"url": f"{storage.cache}/0f0f", "digest": "one"},
    }
    with tracked_run(storage, "train", "key", config, {}, None) as run:
        run.log_metrics({"test_accuracy": 0.9, "best_val_accuracy": 0.9}, step=0)
        run.log_data(TrainingData(table, "c" * 64, {"train": 8, "val": 1, "test": 2}, table.source))
        run.log_text("# the card", CARD)
        run.log_model(folder)
    model = register_run(storage, RunRef(run_id=run.run_id), "photos")
    tag_version(storage, model, serving_tags(table, "photos"))
    set_alias(storage, model, "champion")
    with parent_run(storage, "tune", "study", {"tune": {"seed": 1}}, {}) as parent:
        parent.log_search([{"number": 0}], 0, {}, 0.9, "val_accuracy")
    log_data_checks(storage, "checks", "checks", {"leaked": 0}, {}, {"images": 3.0}, {})
    return model


def tables_in_database(storage: Storage, model: ModelRef) -> set[str]:
    """Return the paths of tables that the database has for a champion: of its run, of its version, and of its cache."""
    tested = evaluated_version(storage, model)
    assert tested.table is not None
    assert tested.cache is not None
    config = logged_training(storage, model.run_id).config
    paths = {tested.table.path, config["data"]["table"], tested.cache.url}
    paths |= {table.path for table in (*tested.serves, *trained_versions(storage))}
    inputs = client_of(storage).get_run(model.run_id).inputs.dataset_inputs
    return paths | {json.loads(found.dataset.source)["path"] for found in inputs}
