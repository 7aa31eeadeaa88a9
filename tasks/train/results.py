"""The MLflow run of a training run: name, tags, parameters and data, metrics while it trains, and results at the end.

Only rank 0 imports this module, which loads MLflow, tables and figures.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tasks.config.frozen import flat_params
from tasks.config.recipe import FineTuningPlan, total_epochs
from tasks.config.train import TrainConfig
from tasks.credentials import without_credentials
from tasks.explain.explainer import HeatOfPackage
from tasks.metrics.evaluate import PrecisionDifference
from tasks.model.device import processor_name
from tasks.model.precision import precision_name
from tasks.model.pretrained import weights_digest
from tasks.model_package.classifier import save_classifier
from tasks.model_package.description import WEIGHTS_FILE
from tasks.progress.activity import working
from tasks.refs import TRAIN, TRIAL_TAG, RunRef, TableRef
from tasks.report.figures import shorten
from tasks.report.model_card import TrainingFacts, why_chosen
from tasks.report.report import event_file, log_report
from tasks.spark.session import NeedsSpark
from tasks.tables import snapshots
from tasks.tables.properties import table_source
from tasks.tracking import runs
from tasks.tracking.evaluated import FOLDS_METRICS, recorded_table
from tasks.tracking.runs import FLOW_SOURCE_TAG, RESUMED_WITH_CHANGES_TAG
from tasks.tracking.sender import MetricSender
from tasks.tracking.server import translate_outage
from tasks.tracking.tracked_run import TrackedRun, TrainingData, tracked_run
from tasks.tracking.trained import REPEAT_TAG
from tasks.tracking.trained_tables import TABLE_ID_TAG
from tasks.train.checkpoint import Checkpoints
from tasks.train.context import TrainingContext
from tasks.train.continuation import continued_run, end_checkpoints
from tasks.train.folds import mean_and_interval
from tasks.train.phases import trains_on_features
from tasks.train.progress import Progress, ResumePoint
from tasks.train.provenance import append_to_note, provenance_changes, recorded_provenance
from tasks.train.serving_form import ServingEvaluation
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.train")

MAX_NAME_CHARACTERS = 200
"""Maximum number of characters of a run's name, of which MLflow's list shows the first."""

SEND_SECONDS = 2.0
"""Maximum seconds for sending the remaining metrics when training is interrupted."""


def find_resume_point(spec: TrainingSpec, checkpoints: Checkpoints) -> ResumePoint:
    """Return the state that earlier processes left of the training run; the caller holds its lock."""
    with translate_outage(spec.storage):
        storage, key = spec.storage, spec.key
        finished = runs.find_finished_run(storage, *spec.keys)
        if finished is not None:
            end_checkpoints(spec)  # The process that finished it may have been killed before.
            return ResumePoint(finished=finished)
        name, content = checkpoints.newest()
        is_own = name is not None and continued_run(spec, content) is None  # A run of fewer epochs stays as it is.
        resume = str(content["run_id"]) if is_own else None
        if resume is None or not runs.has_run(storage, resume):
            # Killed before its first checkpoint; or the MLflow run was deleted, and training resumes in another one.
            resume = runs.find_unfinished_run(storage, key)
        for own in spec.keys:
            runs.end_abandoned_runs(storage, own, keep=resume)
        return ResumePoint(checkpoint=name, resume=resume)


class Record:
    """The open MLflow run of a training run: epochs and tags are sent to it while it trains, and results at the end."""

    def __init__(self, run: TrackedRun, sender: MetricSender, progress: Progress) -> None:
        self.run_id = run.run_id
        self._run = run
        self._sender = sender
        self._progress = progress
        self._num_logged = 0
        self._sent_epochs: set[int] = set()

    def resume(self, continued: str | None) -> None:
        """Send the metrics and tags of a checkpoint that the server did not receive.

        Args:
            continued: MLflow run of fewer epochs that this one continues; None if the checkpoint is of this run.
        """
        if continued:
            self.set_tag(runs.CONTINUES_TAG, continued)
        self._num_logged = len(self._progress.history)
        self._sent_epochs = self._sender.steps_sent("val_loss")
        self.send_epochs()
        for tag, text in self._progress.tags.items():
            self._sender.send_tag(tag, text)

    def note_changes(self, before: dict[str, str], *, has_checkpoint: bool) -> None:
        """Log a warning and set a tag if the provenance differs from `before`, that of a checkpoint, or from the run's.

        Values missing in the checkpoint come from the run's parameters, which MLflow never changes.
        """
        changed = provenance_changes(recorded_provenance(self._run) | before, self._progress.provenance)
        if not changed:
            return
        consequence = (
            "the weights may match those of neither environment"
            if has_checkpoint
            else "the MLflow parameters are those of the first start"
        )
        logger.warning("training resumes with changes: %s; %s", "; ".join(changed), consequence)
        self.set_tag(
            RESUMED_WITH_CHANGES_TAG, append_to_note(self._progress.tags.get(RESUMED_WITH_CHANGES_TAG), changed)
        )

    def set_tag(self, tag: str, text: str) -> None:
        """Set a tag of the MLflow run; it is kept in the checkpoint until it is sent."""
        self._progress.tags[tag] = text
        self._sender.send_tag(tag, text)

    def set_batch_size(self, phase: int) -> None:
        """Set the tag with the batch size that was chosen for a phase."""
        self.set_tag(f"{runs.BATCH_SIZE_TAG}{phase}", str(self._progress.batch_size))

    def set_plan(self, plan: FineTuningPlan) -> None:
        """Set the tag with the plan of the recipe's fine-tuning."""
        self.set_tag(runs.PLAN_TAG, plan.model_dump_json())

    def send_epochs(self) -> None:
        """Send and log the epochs that were not sent or logged yet, also those that an earlier process trained."""
        for metrics in self._progress.history:
            if metrics.epoch not in self._sent_epochs:
                self._sender.send(metrics.values(), metrics.epoch)
                self._sent_epochs.add(metrics.epoch)
        for metrics in self._progress.history[self._num_logged :]:
            logger.info(
                "epoch %d: train loss %.4f, val loss %.4f, val accuracy %.4f, %.0f images/s",
                metrics.epoch, metrics.train_loss, metrics.val_loss, metrics.val_accuracy, metrics.images_per_second,
            )  # fmt: skip
        self._num_logged = len(self._progress.history)

    def log_trace(self, folder: Path) -> None:
        """Log the trace of a phase."""
        self._run.log_folder(folder, "trace")

    def log_histograms(self, epoch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Log the histograms of an epoch by tag; those of an earlier call for the epoch are replaced."""
        with TemporaryDirectory() as folder:
            with event_file(Path(folder), f"{self.run_id}.epoch-{epoch:04d}") as writer:
                for tag, found in values.items():
                    writer.add_histogram(tag, found.numpy(), epoch)
            self._run.log_folder(Path(folder), "tensorboard")

    def abandon(self) -> None:
        """Send the remaining metrics after an error; those not sent in SEND_SECONDS are sent when training resumes."""
        try:
            self._sender.close(SEND_SECONDS)
        except Exception as error:
            logger.warning("not all metrics were sent: %s", error)

    def finish(self, context: TrainingContext, test: ServingEvaluation) -> RunRef:
        """Send the remaining metrics and log the results."""
        with working("logging the results"):
            self.send_epochs()  # If the disk was full, the last epochs have no checkpoint and were not sent.
            self._sender.close()
            log_results(self._run, context, self._progress, test)
        return RunRef(run_id=self.run_id)


@contextmanager
def open_record(context: TrainingContext, progress: Progress, resume: str | None) -> Iterator[Record]:
    """Open the MLflow run of a training run for the block.

    Args:
        context: The training run.
        progress: Its progress.
        resume: Id of the MLflow run to resume; None starts another one.
    """
    storage = context.spec.storage
    if resume is not None and (table := recorded_table(storage, resume)):
        # Another version, or another table with the same bytes, may have asked meanwhile.
        context.manifest = context.manifest.model_copy(update={"table": table})
    data = training_data(context)
    name, config, tags = run_name(context), run_config(context, data), run_tags(context)
    with tracked_run(storage, name, context.spec.key, config, tags, resume) as run:
        run.log_data(data)
        yield Record(run, MetricSender(storage, run.run_id), progress)


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
    """Return the name of the run: network, image size, settings that are not the defaults, and number of ranks.

    A trial and a repetition are named as such.
    """
    tags = context.spec.tags
    ranks = [] if context.spec.distributed is None else [f"{context.ranks.num_virtual} ranks"]
    trial = [f"trial {tags[TRIAL_TAG]}"] if TRIAL_TAG in tags else []
    repeated = ["repeated"] if REPEAT_TAG in tags else []
    network = f"{context.spec.train.model} {context.manifest.image_size} px"
    parts = [network, *ranks, *trial, *repeated, *chosen_settings(context.spec.train)]
    return shorten(", ".join(parts), MAX_NAME_CHARACTERS)


def chosen_settings(train: TrainConfig) -> list[str]:
    """Return the settings that decide the result and are not the defaults, by which runs of one network differ."""
    defaults = flat_params(TrainConfig().decisive())
    chosen = {name: value for name, value in flat_params(train.decisive()).items() if value != defaults.get(name)}
    chosen = {
        name: value for name, value in chosen.items() if name not in {"model", "device", "num_threads", "compile"}
    }
    if train.weights == "none":  # which trains the whole network in any case
        chosen = {name: value for name, value in chosen.items() if name not in {"weights", "freeze_backbone", "recipe"}}
    elif "weights" in chosen:
        # The file of a champion or run is in a folder with the id of its run.
        names = train.weights.split("/")
        chosen["weights"] = names[-2] if names[1:] and names[-1] == WEIGHTS_FILE else names[-1]
    if train.fine_tune:
        chosen["fine_tune"] = " then ".join(phase.unfreeze_from for phase in train.fine_tune)
    started = ["from scratch"] if train.weights == "none" else []
    return started + [
        f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in chosen.items()
    ]


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
    folds = mean_and_interval(progress.folds) if progress.folds else None
    run.log_metrics(
        {
            "best_epoch": best.epoch,
            **{f"best_{name}": value for name, value in vars(best).items() if name.startswith("val_")},
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "test_top5_accuracy": test.top5_accuracy,
            "test_macro_f1": test.macro_f1,
            "test_calibration_error": test.calibration.error,
            "test_calibration_error_uncalibrated": test.uncalibrated.error,
            "temperature": served.temperature,
            **_difference_metrics(served.difference),
            **dict(zip(FOLDS_METRICS, () if folds is None else folds, strict=False)),
        },
        step=best.epoch,
    )
    facts = TrainingFacts(
        train=context.spec.train,
        distributed=context.spec.distributed,
        cache=context.spec.cache,
        manifest=manifest,
        weights_digest=weights_digest(context.spec.train.model, context.spec.train.weights),
        other_size=context.classifier.made_for.difference(manifest.image_size),
        num_ranks=context.ranks.num_virtual,
        device=str(context.device),
        backend_reason=context.spec.backend_reason,
        history=progress.history,
        phases=progress.phases,
        folds=folds,
        plan=progress.fine_tuning,
        max_epochs=total_epochs(context.spec.train, progress.fine_tuning, on_features=trains_on_features(context)),
        best_epoch=best.epoch,
        test=test,
        precision=served.precision,
        temperature=served.temperature,
        scores=served.scores,
        difference=served.difference,
        source=source_of(manifest.table),
        resumed_with_changes=progress.tags.get(RESUMED_WITH_CHANGES_TAG),
    )
    if why := why_chosen(facts):
        run.set_tag(runs.WHY_TAG, why)
    with TemporaryDirectory() as scratch:
        state = context.classifier.state_dict()
        save_classifier(
            Path(scratch),
            context.spec.train.model,
            state,
            manifest.classes,
            manifest.image_size,
            mean=context.classifier.mean,
            std=context.classifier.std,
            precision=served.precision,
            temperature=served.temperature,
            decoding=manifest.decoding,
            unknown_thresholds=served.scores.thresholds(),
        )
        # Its heat maps are those of the package, which has neither a compiler nor layers of training in it.
        heat = HeatOfPackage(Path(scratch), context.device)
        log_report(run, facts, context.counts[TRAIN].tolist(), context.spec.storage, heat)
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
