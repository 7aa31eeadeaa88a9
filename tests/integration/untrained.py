"""Runs with an untrained model, to promote and to predict with."""

from pathlib import Path

import torch

from tasks import tracking
from tasks.config import PredictConfig, PromoteConfig, SparkConfig
from tasks.predict.batch import predict_batch
from tasks.predict.model import save_classifier
from tasks.refs import PredictReport, RunRef
from tasks.storage import Storage
from tasks.train.model import build_classifier

CLASSES = ("blue", "green", "red")


def log_run(storage: Storage, tmp_path: Path, seed: int, accuracy: float) -> RunRef:
    """Log a run as training would."""
    torch.manual_seed(seed)
    classifier = build_classifier("squeezenet1_1", "none", 3, freeze_backbone=False)
    folder = tmp_path / f"classifier-{seed}"
    save_classifier(folder, "squeezenet1_1", classifier.state_dict(), CLASSES, 32)
    config = {"cache": {"digest": "one"}}
    with tracking.tracked_run(storage, "test", f"key-{seed}", config, {}, None) as tracked:
        tracked.log_metrics({"test_accuracy": accuracy}, step=0)
        tracked.log_model(folder)
        return RunRef(run_id=tracked.run_id)


def predict(storage: Storage, **settings) -> PredictReport:
    """Run batch inference."""
    return predict_batch(PredictConfig(batch_size=8, **settings), PromoteConfig(), storage, SparkConfig())
