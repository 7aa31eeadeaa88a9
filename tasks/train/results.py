"""What a training says of itself in MLflow: what it was given, and at its end what came of it."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tasks.predict.model import save_classifier
from tasks.schema import TRAIN
from tasks.storage import Storage
from tasks.tracking import GONE_ON_TAG, TrackedRun
from tasks.train.device import processor_name
from tasks.train.evaluate import DetailedEvaluation
from tasks.train.model import weights_digest
from tasks.train.model_card import TrainingFacts
from tasks.train.precision import precision_name
from tasks.train.progress import Progress
from tasks.train.report import log_report
from tasks.train.stages import Setting

logger = logging.getLogger("lakevision.train")


def run_config(setting: Setting) -> dict[str, Any]:
    """Return all that decides a training, enough to do it again."""
    manifest = setting.manifest
    return {
        "train": setting.train.model_dump(),
        "distributed": None if setting.distributed is None else setting.distributed.model_dump(),
        "cache": {
            "url": setting.cache.url,
            "digest": setting.cache.digest,
            "image_size": manifest.image_size,
            "settings": manifest.settings.decisive(),
        },
        "data": {
            "table": manifest.table.path,
            "version": manifest.table.version,
            "table_id": manifest.table.table_id,
            "source": manifest.table.source,
            "content_digest": manifest.content_digest,
            "rows": {split: part.rows for split, part in manifest.splits.items()},
        },
        "weights_digest": weights_digest(setting.train.model, setting.train.weights),
        "num_ranks": setting.reducer.num_ranks,
        "device": str(setting.device),
        "processor": processor_name(setting.device),
        "precision": precision_name(setting.precision, setting.device),
        "num_threads": torch.get_num_threads(),
    }


def log_results(
    run: TrackedRun, setting: Setting, progress: Progress, test: DetailedEvaluation, storage: Storage
) -> None:
    """Log the metrics of the best epoch and of the split `test`, the report, and the model that was tested."""
    manifest = setting.manifest
    best = progress.history[progress.stopping.best_epoch]
    run.log_metrics(
        {
            "best_epoch": best.epoch,
            "best_val_accuracy": best.val_accuracy,
            "best_val_loss": best.val_loss,
            "best_val_top5_accuracy": best.val_top5_accuracy,
            "best_val_macro_f1": best.val_macro_f1,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "test_top5_accuracy": test.top5_accuracy,
            "test_macro_f1": test.macro_f1,
            "test_calibration_error": test.calibration.error,
        },
        step=best.epoch,
    )
    facts = TrainingFacts(
        train=setting.train,
        distributed=setting.distributed,
        cache=setting.cache,
        manifest=manifest,
        weights_digest=weights_digest(setting.train.model, setting.train.weights),
        num_ranks=setting.reducer.num_ranks,
        device=str(setting.device),
        history=progress.history,
        best_epoch=best.epoch,
        test=test,
        gone_on=progress.tags.get(GONE_ON_TAG),
    )
    log_report(run, facts, setting.counts[TRAIN].tolist(), storage)
    with TemporaryDirectory() as scratch:
        state = setting.classifier.state_dict()
        save_classifier(Path(scratch), setting.train.model, state, manifest.classes, manifest.image_size)
        run.log_model(Path(scratch))
    logger.info("best epoch %d: val accuracy %.4f, test accuracy %.4f", best.epoch, best.val_accuracy, test.accuracy)
