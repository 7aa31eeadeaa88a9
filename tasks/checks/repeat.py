"""Repeat the training run of an MLflow run on the same version of the data, and compare both."""

import hashlib
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from tasks.cache.manifest import open_cache
from tasks.checks.original_run import OriginalRun, read_training
from tasks.errors import WrongInput
from tasks.launch.launcher import launch_ranks
from tasks.model.pretrained import weights_digest
from tasks.refs import CacheRef, MetricPair, RepeatReport, RunRef
from tasks.storage import Storage
from tasks.system.cores import expected_gpu_obstacle
from tasks.tracking.trained import REPEAT_TAG, download_weights
from tasks.train.provenance import expected_provenance, make_provenance, provenance_changes
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.train")

COMPARED = ("val_", "test_", "best_val_")
"""Prefixes of the compared metrics."""


def check_same_data(original: OriginalRun, cache: CacheRef) -> list[str]:
    """Return the difference between the original cache and this one of the same content, as a list of sentences.

    Raises:
        WrongInput: The content of the cache differs from the original.
    """
    manifest = open_cache(cache)
    if manifest.content_digest != original.content_digest:
        raise WrongInput(
            f"'{original.table}' version {original.version} has the content {manifest.content_digest}, but MLflow run "
            f"{original.run_id} was trained on {original.content_digest}",
            way_out="the table was recreated since, and the data of that run is lost; train on the current data with "
            "the flow train",
        )
    if manifest.digest == original.cache_digest:
        return []
    return [f"the cache was {original.cache_digest} and is {manifest.digest}: images are decoded to different pixels"]


def differences_now(original: OriginalRun) -> list[str]:
    """Return the differences from the original run that are known before training, as a list of sentences.

    They cover device, processor, precision, threads, code, packages, weights and settings.

    Raises:
        WrongInput: The device or precision of the settings is not available.
    """
    distributed = original.distributed
    num_ranks = 1 if distributed is None else distributed.num_ranks
    obstacle = None if distributed is None else expected_gpu_obstacle(distributed.decided_backend, num_ranks)
    now = expected_provenance(original.train, original.cache_config.image_size, num_ranks, obstacle)
    found = provenance_changes(_original_provenance(original), now)
    if original.resumed_with_changes is not None:
        found.append(f"MLflow run {original.run_id} was resumed with changes: {original.resumed_with_changes}")
    digest = weights_digest(original.train.model, original.train.weights)
    # Older runs logged DEFAULT and not the file that it stands for.
    if original.weights_digest not in (digest, "DEFAULT"):
        found.append(f"train.weights '{original.train.weights}' were {original.weights_digest} and are {digest}")
    found += [f"train.{name} did not exist then, and has its default" for name in original.new_settings]
    return found


def _original_provenance(run: OriginalRun) -> dict[str, str]:
    """Return the provenance of a run at its start."""
    logged = run.model_dump(include={"device", "processor", "precision", "num_threads", "versions"})
    return make_provenance(**logged, code=run.code_version)


def differences_of(original: OriginalRun, repetition: OriginalRun) -> list[str]:
    """Return the differences between two finished runs as logged, as a list of sentences."""
    found = provenance_changes(_original_provenance(original), _original_provenance(repetition))
    if repetition.resumed_with_changes is not None:
        found.append(f"MLflow run {repetition.run_id} was resumed with changes: {repetition.resumed_with_changes}")
    before, now = original.batch_sizes, repetition.batch_sizes
    return found + [
        f"the batch size of phase {phase} was {before.get(phase, 'not chosen')} and is {now.get(phase, 'not chosen')}"
        for phase in sorted(before.keys() | now.keys())
        if before.get(phase) != now.get(phase)
    ]


def _repetition_id(original: OriginalRun, differences: list[str]) -> str:
    """Return an id of run and differences, so that a repetition is trained once for the same differences."""
    return hashlib.sha256(json.dumps([original.run_id, differences]).encode()).hexdigest()[:16]


def repeat_training(original: OriginalRun, cache: CacheRef, storage: Storage, tags: dict[str, str]) -> RepeatReport:
    """Train again with the same settings, and compare metrics and weights with those of the original run.

    On the same machine with the same packages both are bit-identical.

    Args:
        original: The run to repeat.
        cache: A cache of the same table version.
        storage: Locations of checkpoints and tracking.
        tags: Tags of the new MLflow run.

    Raises:
        WrongInput: The data has changed.
        RankFailed, TimeoutError: As `launch_ranks`.
    """
    differences = check_same_data(original, cache) + differences_now(original)
    for sentence in differences:
        logger.warning("changed since the original run: %s", sentence)
    ranks = original.distributed
    spec = TrainingSpec(
        train=original.train,
        # On this machine, wherever the original was trained: its hosts may have others to serve, or be gone.
        distributed=None if ranks is None else ranks.on_this_machine(),
        cache=cache,
        storage=storage,
        tags=tags | {REPEAT_TAG: original.run_id},
        plan=original.plan,
        repetition=_repetition_id(original, differences),
    )
    run = launch_ranks(spec)
    repetition = read_training(run.run_id, storage)
    differences += [sentence for sentence in differences_of(original, repetition) if sentence not in differences]
    pairs = compare_metrics(original.metrics, repetition.metrics)
    report = RepeatReport(
        run_id=run.run_id,
        repeat_of=original.run_id,
        differences=differences,
        metrics=pairs,
        metrics_agree=all(pair.agrees for pair in pairs),
        weights_equal=_same_weights(storage, run, RunRef(run_id=original.run_id)),
    )
    logger.info(
        "MLflow run %s repeats %s: metrics %s, weights %s",
        *(run.run_id, original.run_id),
        "agree" if report.metrics_agree else "differ",
        "are equal" if report.weights_equal else "differ",
    )
    return report


def compare_metrics(before: dict[str, float], now: dict[str, float]) -> list[MetricPair]:
    """Return the metrics of the splits val and test in pairs, ordered by name."""
    names = sorted(name for name in before.keys() | now.keys() if name.startswith(COMPARED))
    return [MetricPair(metric=name, before=before.get(name), now=now.get(name)) for name in names]


def _same_weights(storage: Storage, one: RunRef, other: RunRef) -> bool:
    with TemporaryDirectory() as folder:
        files = [download_weights(storage, run, Path(folder)) for run in (one, other)]
        states = [load_file(file) for file in files]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )
