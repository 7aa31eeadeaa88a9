"""MLflow runs with an untrained model, for tests of promotion and prediction."""

from pathlib import Path

import torch

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import save_classifier
from tasks.model_package.description import AS_BEFORE, Decoding
from tasks.predict.batch import predict_batch
from tasks.refs import CacheRef, PredictReport, RunRef, TableRef
from tasks.storage import Storage
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking.tracked_run import tracked_run

CLASSES = ("blue", "green", "red")

PHOTOS = TableRef(path="/tables/photos/images", version=3, table_id="photos", source="/data/photos")
"""A table that does not exist."""


def log_run(
    storage: Storage,
    tmp_path: Path,
    seed: int,
    accuracy: float,
    table: TableRef | None = None,
    content: str = "content",
    cache: CacheRef | None = None,
    image_size: int = 32,
    val_accuracy: float | None = None,
    classes: tuple[str, ...] = CLASSES,
    *,
    finite: bool = True,
    decoding: Decoding = AS_BEFORE,
    unknown_thresholds: tuple[float, ...] | None = None,
) -> RunRef:
    """Log a run as training does, on the table `images` if it exists; both accuracies are equal by default.

    The weights are random, or not a number where they shall not be finite. The default decoding is that of caches that
    are written by hand.
    """
    torch.manual_seed(seed)
    classifier = build_classifier("squeezenet1_1", "none", len(classes), freeze_backbone=False)
    if not finite:
        for parameter in classifier.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
    folder = tmp_path / f"classifier-{seed}"
    given = {"decoding": decoding, "unknown_thresholds": unknown_thresholds}
    save_classifier(folder, "squeezenet1_1", classifier.state_dict(), classes, image_size, **given)
    if table is None:
        found = newest_snapshot(None, storage.table("images"))
        table = PHOTOS if found is None else found.table
    config = {
        "cache": {"digest": "one"} if cache is None else cache.model_dump(),
        "data": {
            "table": table.path,
            "version": table.version,
            "table_id": table.table_id,
            "source": table.source,
            "content_digest": content,
            "rows": {"test": 10},
        },
    }
    with tracked_run(storage, "test", f"key-{seed}", config, {}, None) as tracked:
        val_accuracy = accuracy if val_accuracy is None else val_accuracy
        tracked.log_metrics({"test_accuracy": accuracy, "best_val_accuracy": val_accuracy}, step=0)
        tracked.log_model(folder)
        return RunRef(run_id=tracked.run_id)


def predict(storage: Storage, model_name: str | None = None, **settings) -> PredictReport:
    """Run batch inference."""
    promote = PromoteConfig(model_name=model_name)
    return predict_batch(PredictConfig(batch_size=8, **settings), promote, storage, SparkConfig())
