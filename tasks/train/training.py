"""One training on one rank: its stages, its checkpoints, and what of it goes to MLflow."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tasks import tracking
from tasks.cache.manifest import open_cache
from tasks.config import DistributedConfig, TrainConfig
from tasks.predict.model import save_classifier
from tasks.refs import CacheRef, RunRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.storage import Storage
from tasks.train.checkpoint import Checkpoints, check_fits, remove_checkpoints, restore, restore_progress
from tasks.train.device import choose_device
from tasks.train.early_stopping import EarlyStopping
from tasks.train.evaluate import DetailedEvaluation, evaluate_in_detail
from tasks.train.features import BATCH
from tasks.train.finite import Diverged
from tasks.train.fold import fold_batch_norm
from tasks.train.loop import fit
from tasks.train.model import build_classifier, weights_digest
from tasks.train.model_card import TrainingFacts
from tasks.train.name_pictures import name_pictures
from tasks.train.pause import Pauses
from tasks.train.precision import precision_name
from tasks.train.progress import EpochMetrics, Progress
from tasks.train.reduce import Reducer, SingleProcess
from tasks.train.report import log_report
from tasks.train.stages import Setting, Trainable, prepare_stage, stages_of

logger = logging.getLogger("lakevision.train")

LEAVE_SECONDS = 2.0
"""How long a training that ends before its end waits until its metrics are sent."""


def run_key(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> str:
    """Name a training by everything that decides its result, so that the same one is not trained twice."""
    decisive = _decisive(train, cache, distributed, repetition)
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _decisive(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None
) -> dict[str, Any]:
    """Return what names a training, and what a checkpoint must have in common with it."""
    decisive: dict[str, Any] = {
        "cache": cache.digest,
        # By content: another file at the same path is another training, and the same file elsewhere is the same.
        "train": train.decisive() | {"weights": weights_digest(train.weights)},
        "ranks": None
        if distributed is None
        else distributed.model_dump(include={"num_ranks", "scale_learning_rate", "warmup_epochs"}),
    }
    if repetition is not None:
        decisive["repetition"] = repetition
    return decisive


class Training:
    """One training on one rank."""

    def __init__(
        self,
        train: TrainConfig,
        cache: CacheRef,
        storage: Storage,
        distributed: DistributedConfig | None,
        reducer: Reducer,
        tags: dict[str, str],
        on_epoch: Callable[[EpochMetrics], None] | None,
        repetition: str | None = None,
    ) -> None:
        self.key = run_key(train, cache, distributed, repetition)
        self.folder = storage.checkpoints / self.key
        self._train = train
        self._cache = cache
        self._storage = storage
        self._distributed = distributed
        self._reducer = reducer
        self._tags = tags
        self._on_epoch = on_epoch
        self._identity = _decisive(train, cache, distributed, repetition)
        self.checkpoints = Checkpoints(self.folder, train.keep_checkpoints, self._identity)
        self.progress = Progress(
            EarlyStopping(train.patience, train.min_delta, higher_is_better=train.monitor != "val_loss")
        )
        # On rank 0 alone, while the MLflow run is open.
        self._run: tracking.TrackedRun | None = None
        self._sender: tracking.MetricSender | None = None
        self._num_sent = 0

    def run(self, found: tuple[RunRef | None, dict[str, Any] | None] | None) -> RunRef:
        """Train on this rank.

        Args:
            found: On rank 0 the finished run and the checkpoint, where there are such.
        """
        finished, checkpoint = self._reducer.broadcast(found)
        if finished is not None:
            logger.info("MLflow run %s has trained this already: nothing to train", finished.run_id)
            return RunRef(run_id=finished.run_id)
        setting = self._prepare()
        if checkpoint is not None:
            check_fits(checkpoint, self._identity)
            restore_progress(checkpoint, self.progress, self._reducer.rank)
            logger.info("going on at epoch %d, picture %d", self.progress.next_epoch, self.progress.running.position)
        if self._reducer.rank != 0:
            self._run_stages(setting, checkpoint)
            self._test(setting)
            return RunRef(run_id=self._reducer.broadcast(None))
        resume = checkpoint["run_id"] if checkpoint else None
        name = f"{self._train.model}-{self._reducer.num_ranks}-ranks" if self._distributed else self._train.model
        config = self._config(setting)
        with tracking.tracked_run(self._storage, name, self.key, config, self._tags, resume) as run:
            self._run, self._sender = run, tracking.MetricSender(self._storage, run.run_id)
            if checkpoint is not None:
                self._send_missing(self._sender)
            self._num_sent = len(self.progress.history)
            try:
                self._run_stages(setting, checkpoint)
                test = self._test(setting)
            except BaseException:
                # Those that a server does not take so soon are in the checkpoint, and sent when the training goes on.
                with suppress(tracking.TrackingAway):
                    self._sender.close(LEAVE_SECONDS)
                raise
            self._sender.close()
            self._log_results(run, setting, test)
            run_id: str = self._reducer.broadcast(run.run_id)
        remove_checkpoints(self.folder)
        return RunRef(run_id=run_id)

    def _prepare(self) -> Setting:
        train, reducer = self._train, self._reducer
        manifest = open_cache(self._cache)
        device = choose_device(train.device, reducer.rank, reducer.gpu_obstacle)
        torch.set_num_threads(train.num_threads or max(1, (os.cpu_count() or 1) // reducer.num_ranks))
        torch.manual_seed(train.seed)
        classifier = build_classifier(train.model, train.weights, len(manifest.classes), train.freeze_backbone)
        classifier = classifier.to(device)
        reducer.broadcast_model(classifier)
        if reducer.num_ranks == 1:
            # In the memory format of the cache's pixels; Horovod takes tensors in the other one alone.
            classifier = classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        setting = Setting(
            train, self._distributed, self._cache, manifest, self._storage.cache, classifier, device, reducer
        )
        setting.check()
        return setting

    def _run_stages(self, setting: Setting, checkpoint: dict[str, Any] | None) -> None:
        progress, classifier = self.progress, setting.classifier
        for stage in stages_of(self._train):
            if stage.number < progress.stage:
                continue
            if stage.number > progress.stage:
                # It begins with the best weights so far, and counts its own patience.
                progress.stage, progress.first_epoch = stage.number, progress.next_epoch
                progress.stopping = replace(progress.stopping, epochs_without_improvement=0)
                progress.best_state = {name: value.cpu().clone() for name, value in classifier.state_dict().items()}
            trainable = prepare_stage(setting, stage, progress)
            if checkpoint is not None and checkpoint["stage"] == stage.number:
                restore(checkpoint, trainable.model, trainable.optimizer, self._reducer)
            if self._fit(setting, stage.max_epochs, trainable):
                break

    def _fit(self, setting: Setting, max_epochs: int, trainable: Trainable) -> bool:
        """Train a stage; say whether the time budget is used up."""
        train, progress, reducer, model = self._train, self.progress, self._reducer, trainable.model
        optimizer = reducer.wrap_optimizer(trainable.optimizer, model.named_parameters())

        def save() -> None:
            content = self.checkpoints.collect(model, optimizer, progress, reducer)
            # Metrics leave the process with the checkpoint that covers them: none is counted twice.
            if self._run is not None and self.checkpoints.save(content, progress, self._run.run_id):
                self._send_new()

        def seconds_left() -> float:
            return (train.max_seconds or float("inf")) - progress.seconds - progress.running.seconds

        pauses = Pauses(reducer, save, checkpoint_seconds=train.checkpoint_seconds, seconds_left=seconds_left)

        def on_epoch(metrics: EpochMetrics, _progress: Progress) -> None:
            save()
            pauses.saved()
            if self._on_epoch is not None and reducer.rank == 0:
                self._on_epoch(metrics)

        try:
            return fit(
                model,
                trainable.loaders[TRAIN],
                trainable.loaders[VAL],
                optimizer,
                trainable.learning_rate,
                progress,
                max_epochs=max_epochs,
                monitor=train.monitor,
                num_classes=len(setting.manifest.classes),
                device=setting.device,
                reducer=reducer,
                on_epoch=on_epoch,
                settings=trainable.settings,
                pauses=pauses,
            )
        except Diverged as diverged:
            raise diverged.naming(lambda rows: name_pictures(setting.manifest, TRAIN, rows, self._storage)) from None
        except KeyboardInterrupt:
            # Within the validation, when every rank has trained the whole epoch; else the checkpoint is there already.
            if self._run is not None and progress.running.is_trained:
                alone = self.checkpoints.collect(model, optimizer, progress, SingleProcess())
                self.checkpoints.save(alone, progress, self._run.run_id)
            raise

    def _send_missing(self, sender: tracking.MetricSender) -> None:
        """Send what the checkpoint has and the run has not: that process was killed, or the server away."""
        there = sender.steps_sent("val_loss")
        for metrics in self.progress.history:
            if metrics.epoch not in there:
                sender.send(metrics.values(), metrics.epoch)

    def _send_new(self) -> None:
        assert self._sender is not None, "a run has a sender"
        for metrics in self.progress.history[self._num_sent :]:
            self._sender.send(metrics.values(), metrics.epoch)
            logger.info(
                "epoch %d: train loss %.4f, val loss %.4f, val accuracy %.4f, %.0f images/s",
                metrics.epoch, metrics.train_loss, metrics.val_loss, metrics.val_accuracy, metrics.images_per_second,
            )  # fmt: skip
        self._num_sent = len(self.progress.history)

    def _test(self, setting: Setting) -> DetailedEvaluation:
        """Evaluate what will serve: the whole network on pictures, in the form and precision of inference."""
        setting.classifier.precision = None
        network = fold_batch_norm(setting.classifier)
        pictures = setting.pictures(TEST, BATCH)
        return evaluate_in_detail(network, pictures, len(setting.manifest.classes), setting.device, self._reducer)

    def _config(self, setting: Setting) -> dict[str, Any]:
        manifest = setting.manifest
        return {
            "train": self._train.model_dump(),
            "distributed": None if self._distributed is None else self._distributed.model_dump(),
            "cache": {
                "url": self._cache.url,
                "digest": self._cache.digest,
                "image_size": manifest.image_size,
                "settings": manifest.settings.decisive(),
            },
            "data": {
                "table": manifest.table.path,
                "version": manifest.table.version,
                "content_digest": manifest.content_digest,
                "rows": {split: part.rows for split, part in manifest.splits.items()},
            },
            "weights_digest": weights_digest(self._train.weights),
            "num_ranks": self._reducer.num_ranks,
            "device": str(setting.device),
            "precision": precision_name(setting.precision),
        }

    def _log_results(self, run: tracking.TrackedRun, setting: Setting, test: DetailedEvaluation) -> None:
        manifest, progress = setting.manifest, self.progress
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
            train=self._train,
            distributed=self._distributed,
            cache=self._cache,
            manifest=manifest,
            weights_digest=weights_digest(self._train.weights),
            num_ranks=self._reducer.num_ranks,
            device=str(setting.device),
            history=progress.history,
            best_epoch=best.epoch,
            test=test,
        )
        log_report(run, facts, self._storage)
        with TemporaryDirectory() as scratch:
            state = setting.classifier.state_dict()
            save_classifier(Path(scratch), self._train.model, state, manifest.classes, manifest.image_size)
            run.log_model(Path(scratch))
        logger.info(
            "best epoch %d: val accuracy %.4f, test accuracy %.4f", best.epoch, best.val_accuracy, test.accuracy
        )
