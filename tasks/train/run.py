"""One training run, from a cache to a finished MLflow run: what every rank does, whether there is one or many."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock
import torch
from torch import nn

from tasks import tracking
from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheManifest, open_cache
from tasks.config import DistributedConfig, TrainConfig
from tasks.errors import WrongInput
from tasks.predict.model import save_classifier
from tasks.refs import CacheRef, RunRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.storage import Storage
from tasks.train.checkpoint import load_checkpoint, restore, save_checkpoint
from tasks.train.device import choose_device, make_optimizer
from tasks.train.early_stopping import EarlyStopping
from tasks.train.evaluate import Evaluation, Loader, evaluate
from tasks.train.features import FeatureLoader, ends_in_head
from tasks.train.finite import Diverged
from tasks.train.loop import EpochMetrics, Progress, StepSettings, fit
from tasks.train.model import Classifier, build_classifier, weights_digest
from tasks.train.name_pictures import name_pictures
from tasks.train.reduce import Reducer, SingleProcess
from tasks.train.report import log_evaluation
from tasks.train.schedule import learning_rate

logger = logging.getLogger("lakevision.train")


def run_key(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> str:
    """Name a training by everything that decides its result, so that the same one is not trained twice."""
    decisive = {
        "cache": cache.digest,
        # By content: another file at the same path is another training, and the same file elsewhere is the same.
        "train": train.model_dump(exclude={"timeout_seconds"}) | {"weights": weights_digest(train.weights)},
        "ranks": None
        if distributed is None
        else distributed.model_dump(include={"num_ranks", "scale_learning_rate", "warmup_epochs"}),
    }
    if repetition is not None:
        decisive["repetition"] = repetition
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _loaders(
    train: TrainConfig,
    url: str,
    manifest: CacheManifest,
    classifier: Classifier,
    device: torch.device,
    reducer: Reducer,
) -> tuple[nn.Module, dict[str, Loader]]:
    """Return what is trained and the batches it takes: the whole network on pictures, or its head on features."""
    loaders = {
        split: CacheLoader(
            url,
            manifest,
            split,
            train.batch_size,
            seed=train.seed if split == TRAIN else None,
            rank=reducer.rank,
            num_ranks=reducer.num_ranks,
        )
        for split in (TRAIN, VAL, TEST)
    }
    if train.freeze_backbone:
        size = manifest.image_size
        sample = torch.randint(
            0, 256, (2, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        if ends_in_head(classifier, sample.to(device)):
            seeds = {TRAIN: train.seed, VAL: None, TEST: None}
            return classifier.head, {
                split: FeatureLoader(loader, classifier, device, seeds[split]) for split, loader in loaders.items()
            }
    return classifier, dict(loaders)


def train_model(
    train: TrainConfig,
    cache: CacheRef,
    storage: Storage,
    distributed: DistributedConfig | None = None,
    reducer: Reducer | None = None,
    tags: dict[str, str] | None = None,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    repetition: str | None = None,
) -> RunRef:
    """Train, evaluate the best weights on the split `test`, and log it all to MLflow.

    A run killed on the way goes on from its last epoch when it is started again with the same inputs, in the same
    MLflow run. A finished one is not repeated.

    Args:
        train: Settings of the training.
        cache: The cache to train from.
        storage: Where checkpoints and tracking lie.
        distributed: Settings of the ranks, where there are many.
        reducer: The other ranks; None for a single process.
        tags: Tags of the MLflow run.
        on_epoch: Called on rank 0 after each epoch.
        repetition: Names a repetition, which is trained although the same was trained before.

    Raises:
        WrongInput: Weights, model or device that cannot be.
        CacheDamaged: The cache is not what it was.
    """
    reducer = reducer or SingleProcess()
    key = run_key(train, cache, distributed, repetition)
    folder = storage.checkpoints / key
    if reducer.rank != 0:
        return _train_rank(train, cache, storage, distributed, reducer, key, folder, None, tags or {}, on_epoch)
    folder.mkdir(parents=True, exist_ok=True)
    # Two that want the same training: one trains, the other waits and finds it done. Launchers queue before they start
    # ranks; this lock is for plain calls, and for a rank that outlives its launcher.
    with filelock.FileLock(f"{folder}.lock"):
        finished = tracking.find_finished_run(storage, key)
        resume = None
        if finished is None:
            checkpoint = load_checkpoint(folder / "last.pt")
            # Somebody may have deleted the run, or the database: then the training goes on in a new one.
            resume = checkpoint["run_id"] if checkpoint and tracking.has_run(storage, checkpoint["run_id"]) else None
            tracking.end_abandoned_runs(storage, key, keep=resume)
        return _train_rank(
            train, cache, storage, distributed, reducer, key, folder, (finished, resume), tags or {}, on_epoch
        )


def _train_rank(
    train: TrainConfig,
    cache: CacheRef,
    storage: Storage,
    distributed: DistributedConfig | None,
    reducer: Reducer,
    key: str,
    folder: Path,
    found: tuple[RunRef | None, str | None] | None,
    tags: dict[str, str],
    on_epoch: Callable[[EpochMetrics], None] | None,
) -> RunRef:
    finished, resume = reducer.broadcast(found)
    if finished is not None:
        logger.info("MLflow run %s has trained this already: nothing to train", finished.run_id)
        return RunRef(run_id=finished.run_id)
    manifest = open_cache(cache)
    if train.monitor == "val_top5_accuracy" and len(manifest.classes) <= 5:
        raise WrongInput(
            f"train.monitor is 'val_top5_accuracy', which is 1 in every epoch of {len(manifest.classes)} classes: "
            "watch val_accuracy, val_macro_f1 or val_loss"
        )
    device = choose_device(train.device, reducer.rank, reducer.gpu_obstacle)
    torch.set_num_threads(train.num_threads or max(1, (os.cpu_count() or 1) // reducer.num_ranks))
    torch.manual_seed(train.seed)
    classifier = build_classifier(train.model, train.weights, len(manifest.classes), train.freeze_backbone).to(device)
    reducer.broadcast_model(classifier)
    model, loaders = _loaders(train, cache.url, manifest, classifier, device, reducer)
    optimizer = make_optimizer(train, model)
    progress = Progress(EarlyStopping(train.patience, train.min_delta, higher_is_better=train.monitor != "val_loss"))
    checkpoint = reducer.broadcast(load_checkpoint(folder / "last.pt") if reducer.rank == 0 else None)
    if checkpoint is not None:
        restore(checkpoint, model, optimizer, progress)
        logger.info("going on with MLflow run %s at epoch %d", checkpoint["run_id"], progress.next_epoch)
    optimizer = reducer.wrap_optimizer(optimizer, model.named_parameters())
    rate = learning_rate(train, distributed, loaders[TRAIN].num_steps)

    def run_epochs(log: Callable[[EpochMetrics, Progress], None]) -> Evaluation:
        try:
            fit(
                model,
                loaders[TRAIN],
                loaders[VAL],
                optimizer,
                rate,
                progress,
                max_epochs=train.max_epochs,
                monitor=train.monitor,
                num_classes=len(manifest.classes),
                seed=train.seed,
                device=device,
                reducer=reducer,
                on_epoch=log,
                settings=StepSettings(train.label_smoothing, train.max_gradient_norm),
            )
        except Diverged as diverged:
            raise diverged.naming(lambda rows: name_pictures(manifest, TRAIN, rows, storage)) from None
        return evaluate(model, loaders[TEST], len(manifest.classes), device, reducer)

    if reducer.rank != 0:
        run_epochs(lambda metrics, now: None)
        return RunRef(run_id=reducer.broadcast(None))

    config = {
        "train": train.model_dump(),
        "distributed": None if distributed is None else distributed.model_dump(),
        "cache": {"url": cache.url, "digest": cache.digest, "image_size": manifest.image_size}
        | {"settings": manifest.settings.decisive()},
        "data": {
            "table": manifest.table.path,
            "version": manifest.table.version,
            "content_digest": manifest.content_digest,
            "rows": {split: part.rows for split, part in manifest.splits.items()},
        },
        "weights_digest": weights_digest(train.weights),
        "num_ranks": reducer.num_ranks,
        "device": str(device),
    }
    name = f"{train.model}-{reducer.num_ranks}-ranks" if distributed else train.model
    with tracking.tracked_run(storage, name, key, config, tags, resume) as run:

        def log(metrics: EpochMetrics, now: Progress) -> None:
            values = {field: float(value) for field, value in asdict(metrics).items() if field != "epoch"}
            run.log_metrics(values, step=metrics.epoch)
            save_checkpoint(folder / "last.pt", model, optimizer, now, run.run_id)
            logger.info(
                "epoch %d: train loss %.4f, val loss %.4f, val accuracy %.4f, %.0f images/s",
                metrics.epoch, metrics.train_loss, metrics.val_loss, metrics.val_accuracy, metrics.images_per_second,
            )  # fmt: skip
            if on_epoch is not None:
                on_epoch(metrics)

        test = run_epochs(log)
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
            },
            step=best.epoch,
        )
        log_evaluation(run, test, manifest.classes)
        with TemporaryDirectory() as scratch:
            save_classifier(Path(scratch), train.model, classifier.state_dict(), manifest.classes, manifest.image_size)
            run.log_model(Path(scratch))
        run_id: str = reducer.broadcast(run.run_id)
    (folder / "last.pt").unlink(missing_ok=True)
    logger.info("best epoch %d: val accuracy %.4f, test accuracy %.4f", best.epoch, best.val_accuracy, test.accuracy)
    return RunRef(run_id=run_id)
