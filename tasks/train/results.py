"""Contents of the MLflow run: name, tags, parameters and data at the start, results at the end."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tasks.credentials import without_credentials
from tasks.metrics.evaluate import PrecisionDifference
from tasks.model.device import processor_name
from tasks.model.precision import precision_name
from tasks.model.pretrained import weights_digest
from tasks.model_package.classifier import save_classifier
from tasks.refs import TableRef
from tasks.report.model_card import TrainingFacts
from tasks.report.report import log_report
from tasks.schema import TRAIN
from tasks.spark.session import NeedsSpark
from tasks.tables import snapshots
from tasks.tables.properties import table_source
from tasks.tracking import (
    FLOW_SOURCE_TAG,
    REPEAT_TAG,
    RESUMED_WITH_CHANGES_TAG,
    TABLE_ID_TAG,
    TRIAL_TAG,
    TrackedRun,
    TrainingData,
)
from tasks.train.phases import TrainingContext
from tasks.train.progress import Progress
from tasks.train.serving_form import ServingEvaluation

logger = logging.getLogger("lakevision.train")


def training_data(context: TrainingContext) -> TrainingData:
    """Return table, version, content, rows and source of the images that the run is trained on."""
    manifest = context.manifest
    rows = {split: part.rows for split, part in manifest.splits.items()}
    return TrainingData(manifest.table, manifest.content_digest, rows, source_of(manifest.table))


def source_of(table: TableRef) -> str | None:
    """Return the folder or URL of a table's images; None for a table that only Spark can read, or a deleted version."""
    try:
        source = table.source or table_source(snapshots.properties_of(table))
    except (NeedsSpark, OSError, ValueError):
        return None
    return without_credentials(source) if source else None


def run_name(context: TrainingContext) -> str:
    """Return the name of the run: network, image size, and number of ranks, trial or repetition."""
    tags = context.spec.tags
    ranks = [] if context.spec.distributed is None else [f"{context.ranks.num_virtual} ranks"]
    trial = [f"trial {tags[TRIAL_TAG]}"] if TRIAL_TAG in tags else []
    repeated = ["repeated"] if REPEAT_TAG in tags else []
    return ", ".join([f"{context.spec.train.model} {context.manifest.image_size} px", *ranks, *trial, *repeated])


def run_tags(context: TrainingContext) -> dict[str, str]:
    """Return the tags of the run: the given ones, the flow as its source, and the id of the table."""
    tags = context.spec.tags
    if TRIAL_TAG in tags or REPEAT_TAG in tags:
        flow = "tune" if TRIAL_TAG in tags else "repeat"
    else:
        flow = "train" if context.spec.distributed is None else "train_distributed"
    table_id = context.manifest.table.table_id
    own = {FLOW_SOURCE_TAG: f"flows.{flow}", **({TABLE_ID_TAG: table_id} if table_id else {})}
    return own | dict(tags)


def run_config(context: TrainingContext, data: TrainingData) -> dict[str, Any]:
    """Return everything that decides the result, sufficient to repeat the training run."""
    manifest = context.manifest
    return {
        "train": context.spec.train.model_dump(),
        "distributed": None if context.spec.distributed is None else context.spec.distributed.model_dump(),
        "cache": {
            "url": context.spec.cache.url,
            "digest": context.spec.cache.digest,
            "image_size": manifest.image_size,
            "settings": manifest.settings.decisive(),
        },
        "data": {
            "table": manifest.table.path,
            "version": manifest.table.version,
            "table_id": manifest.table.table_id,
            "content_digest": manifest.content_digest,
            "source": data.source or "",
            "rows": dict(data.rows),
        },
        "weights_digest": weights_digest(context.spec.train.model, context.spec.train.weights),
        "num_ranks": context.ranks.num_virtual,
        "device": str(context.device),
        "processor": processor_name(context.device),
        "precision": precision_name(context.precision, context.device),
        "num_threads": torch.get_num_threads(),
    }


def log_results(run: TrackedRun, context: TrainingContext, progress: Progress, served: ServingEvaluation) -> None:
    """Log the metrics of the best epoch and of the split `test`, the report, and the evaluated model."""
    manifest, test = context.manifest, served.evaluation
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
            "test_calibration_error_uncalibrated": test.uncalibrated.error,
            "temperature": served.temperature,
            **_difference_metrics(served.difference),
        },
        step=best.epoch,
    )
    facts = TrainingFacts(
        train=context.spec.train,
        distributed=context.spec.distributed,
        cache=context.spec.cache,
        manifest=manifest,
        weights_digest=weights_digest(context.spec.train.model, context.spec.train.weights),
        num_ranks=context.ranks.num_virtual,
        device=str(context.device),
        history=progress.history,
        best_epoch=best.epoch,
        test=test,
        precision=served.precision,
        temperature=served.temperature,
        difference=served.difference,
        source=source_of(manifest.table),
        resumed_with_changes=progress.tags.get(RESUMED_WITH_CHANGES_TAG),
    )
    log_report(run, facts, context.counts[TRAIN].tolist(), context.spec.storage)
    with TemporaryDirectory() as scratch:
        state = context.classifier.state_dict()
        save_classifier(
            Path(scratch),
            context.spec.train.model,
            state,
            manifest.classes,
            manifest.image_size,
            precision=served.precision,
            temperature=served.temperature,
        )
        run.log_model(Path(scratch))
    logger.info("best epoch %d: val accuracy %.4f, test accuracy %.4f", best.epoch, best.val_accuracy, test.accuracy)


def _difference_metrics(difference: PrecisionDifference | None) -> dict[str, float]:
    """Return the metrics of the difference between the serving precision and float32."""
    if difference is None:
        return {}
    return {
        "precision_mean_difference": difference.mean,
        "precision_largest_difference": difference.largest,
        "precision_changed_labels": difference.changed_labels,
    }
