"""Repeat the training run of an MLflow run on the same version of the data, and compare both."""

import hashlib
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tasks import tracking
from tasks.cache.manifest import open_cache
from tasks.errors import WrongInput
from tasks.launch.launcher import launch_ranks
from tasks.launch.rank import gpu_obstacle
from tasks.model.pretrained import weights_digest
from tasks.refs import CacheRef, MetricPair, RepeatReport, RunRef
from tasks.repeat.original_run import OriginalRun, read_training
from tasks.storage import Storage
from tasks.train.provenance import expected_provenance, make_provenance, provenance_changes
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.train")

COMPARED = ("val_", "test_", "best_val_")
"""Prefixes of the compared metrics."""


def check_same_data(first: OriginalRun, cache: CacheRef) -> list[str]:
    """Return the difference between the original cache and this one of the same content, as a list of sentences.

    Raises:
        WrongInput: The content of the cache differs from the original.
    """
    manifest = open_cache(cache)
    if manifest.content_digest != first.content_digest:
        raise WrongInput(
            f"'{first.table}' version {first.version} has the content {manifest.content_digest}, but MLflow run "
            f"{first.run_id} was trained on {first.content_digest}: the table was recreated since, and the data of "
            "that run is lost; train on the current data with the flow train"
        )
    if manifest.digest == first.cache_digest:
        return []
    return [f"the cache was {first.cache_digest} and is {manifest.digest}: images are decoded to different pixels"]


def differences_now(first: OriginalRun) -> list[str]:
    """Return the differences from the original run that are known before training, as a list of sentences.

    They cover device, processor, precision, threads, code, packages, weights and settings.

    Raises:
        WrongInput: The device or precision of the settings is not available.
    """
    num_ranks = 1 if first.distributed is None else first.distributed.num_ranks
    now = expected_provenance(first.train, first.cache_config.image_size, num_ranks, _gpu_obstacle(num_ranks))
    found = provenance_changes(_original_provenance(first), now)
    if first.resumed_with_changes is not None:
        found.append(f"MLflow run {first.run_id} was resumed with changes: {first.resumed_with_changes}")
    digest = weights_digest(first.train.model, first.train.weights)
    # Older runs logged DEFAULT and not the file that it stands for.
    if first.weights_digest not in (digest, "DEFAULT"):
        found.append(f"train.weights '{first.train.weights}' were {first.weights_digest} and are {digest}")
    found += [f"train.{name} did not exist then, and has its default" for name in first.new_settings]
    return found


def _original_provenance(run: OriginalRun) -> dict[str, str]:
    """Return the provenance of a run at its start."""
    return make_provenance(
        device=run.device,
        processor=run.processor,
        precision=run.precision,
        num_threads=run.num_threads,
        code=run.code_version,
        versions=run.versions,
    )


def _gpu_obstacle(num_ranks: int) -> str | None:
    if num_ranks == 1 or not torch.cuda.is_available():
        return None
    import horovod.torch as hvd  # Here: it takes seconds to load. `nccl_built` needs no other ranks.

    return gpu_obstacle(hvd.nccl_built(), num_ranks, torch.cuda.device_count())


def differences_of(first: OriginalRun, second: OriginalRun) -> list[str]:
    """Return the differences between two finished runs as logged, as a list of sentences."""
    found = provenance_changes(_original_provenance(first), _original_provenance(second))
    if second.resumed_with_changes is not None:
        found.append(f"MLflow run {second.run_id} was resumed with changes: {second.resumed_with_changes}")
    before, now = first.batch_sizes, second.batch_sizes
    return found + [
        f"the batch size of phase {phase} was {before.get(phase, 'not chosen')} and is {now.get(phase, 'not chosen')}"
        for phase in sorted(before.keys() | now.keys())
        if before.get(phase) != now.get(phase)
    ]


def _repetition_id(first: OriginalRun, differences: list[str]) -> str:
    """Return an id of run and differences, so that a repetition is trained once for the same differences."""
    return hashlib.sha256(json.dumps([first.run_id, differences]).encode()).hexdigest()[:16]


def repeat_training(first: OriginalRun, cache: CacheRef, storage: Storage, tags: dict[str, str]) -> RepeatReport:
    """Train again with the same settings, and compare metrics and weights with those of the original run.

    On the same machine with the same packages both are bit-identical.

    Args:
        first: The run to repeat.
        cache: A cache of the same table version.
        storage: Locations of checkpoints and tracking.
        tags: Tags of the new MLflow run.

    Raises:
        WrongInput: The data has changed.
        RankFailed, TimeoutError: As `launch_ranks`.
    """
    differences = check_same_data(first, cache) + differences_now(first)
    for sentence in differences:
        logger.warning("changed since the original run: %s", sentence)
    spec = TrainingSpec(
        train=first.train,
        distributed=first.distributed,
        cache=cache,
        storage=storage,
        tags=tags | {tracking.REPEAT_TAG: first.run_id},
        repetition=_repetition_id(first, differences),
    )
    run = launch_ranks(spec)
    second = read_training(run.run_id, storage)
    differences += [sentence for sentence in differences_of(first, second) if sentence not in differences]
    pairs = compare_metrics(first.metrics, second.metrics)
    report = RepeatReport(
        run_id=run.run_id,
        repeat_of=first.run_id,
        differences=differences,
        metrics=pairs,
        metrics_agree=all(pair.agrees for pair in pairs),
        weights_equal=_same_weights(storage, run, RunRef(run_id=first.run_id)),
    )
    logger.info(
        "MLflow run %s repeats %s: metrics %s, weights %s",
        *(run.run_id, first.run_id),
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
        files = [tracking.download_weights(storage, run, Path(folder)) for run in (one, other)]
        states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )
