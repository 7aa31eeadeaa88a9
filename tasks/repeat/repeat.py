"""Train again what an MLflow run says it trained, on the same version of the data, and compare the two."""

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
from tasks.launch.spec import RankSpec
from tasks.model.pretrained import weights_digest
from tasks.refs import CacheRef, MetricPair, RepeatReport, RunRef
from tasks.repeat.original_run import FirstTraining, read_training
from tasks.storage import Storage
from tasks.train.provenance import changes, expected_provenance, named

logger = logging.getLogger("lakevision.train")

COMPARED = ("val_", "test_", "best_val_")
"""What the names of the compared metrics begin with."""


def check_same_data(first: FirstTraining, cache: CacheRef) -> list[str]:
    """Return what is different about a cache of the same content.

    Raises:
        WrongInput: Its content is another.
    """
    manifest = open_cache(cache)
    if manifest.content_digest != first.content_digest:
        raise WrongInput(
            f"'{first.table}' version {first.version} has the content {manifest.content_digest}, but MLflow run "
            f"{first.run_id} was trained on {first.content_digest}: the table was made anew since, and what that run "
            "saw is in it no more; train on what there is with the flow train"
        )
    if manifest.digest == first.cache_digest:
        return []
    return [f"the cache was {first.cache_digest} and is {manifest.digest}: images are decoded to other pixels"]


def differences_now(first: FirstTraining) -> list[str]:
    """Return what is not as it was when the run was trained, and is known before anything is trained; a sentence each.

    Device, processor, number format, threads, code, packages, weights and settings.

    Raises:
        WrongInput: The device or number format that it asks for is not there.
    """
    num_ranks = 1 if first.distributed is None else first.distributed.num_ranks
    now = expected_provenance(first.train, first.cache.image_size, num_ranks, _gpu_obstacle(num_ranks))
    found = changes(_original_provenance(first), now)
    if first.gone_on is not None:
        found.append(f"MLflow run {first.run_id} was not computed in one way: {first.gone_on}")
    digest = weights_digest(first.train.model, first.train.weights)
    # Runs of before did not say what DEFAULT stood for.
    if first.weights_digest not in (digest, "DEFAULT"):
        found.append(f"train.weights '{first.train.weights}' were {first.weights_digest} and are {digest}")
    found += [f"train.{name} was no setting then, and has its default" for name in first.unknown_then]
    return found


def _original_provenance(training: FirstTraining) -> dict[str, str]:
    """Return what a training was begun on and with."""
    return named(
        device=training.device,
        processor=training.processor,
        precision=training.precision,
        num_threads=training.num_threads,
        code=training.code_version,
        versions=training.versions,
    )


def _gpu_obstacle(num_ranks: int) -> str | None:
    if num_ranks == 1 or not torch.cuda.is_available():
        return None
    import horovod.torch as hvd  # Here: it takes seconds to load. It says how it was built without other ranks.

    return gpu_obstacle(hvd.nccl_built(), num_ranks, torch.cuda.device_count())


def differences_of(first: FirstTraining, second: FirstTraining) -> list[str]:
    """Return what both trainings say of themselves and what is not alike; a sentence each."""
    found = changes(_original_provenance(first), _original_provenance(second))
    if second.gone_on is not None:
        found.append(f"MLflow run {second.run_id} was not computed in one way: {second.gone_on}")
    before, now = first.batch_sizes, second.batch_sizes
    return found + [
        f"the batch size of stage {stage} was {before.get(stage, 'not chosen')} and is {now.get(stage, 'not chosen')}"
        for stage in sorted(before.keys() | now.keys())
        if before.get(stage) != now.get(stage)
    ]


def _repetition(first: FirstTraining, different: list[str]) -> str:
    """Name the repetition: the same one is trained once, and anew where something else has changed since."""
    return hashlib.sha256(json.dumps([first.run_id, different]).encode()).hexdigest()[:16]


def repeat_training(first: FirstTraining, cache: CacheRef, storage: Storage, tags: dict[str, str]) -> RepeatReport:
    """Train again with the same settings, and compare metrics and weights with those of the first run.

    On the same machine with the same packages both are the same to the last bit.

    Args:
        first: The run to repeat.
        cache: The cache of the same table version.
        storage: Where checkpoints and tracking lie.
        tags: Tags of the new MLflow run.

    Raises:
        WrongInput: The data is no more what it was.
        RankFailed, TimeoutError: As `launch_ranks`.
    """
    different = check_same_data(first, cache) + differences_now(first)
    for sentence in different:
        logger.warning("not as it was: %s", sentence)
    spec = RankSpec(
        train=first.train,
        distributed=first.distributed,
        cache=cache,
        storage=storage,
        tags=tags | {tracking.REPEAT_TAG: first.run_id},
        repetition=_repetition(first, different),
    )
    run = launch_ranks(spec)
    second = read_training(run.run_id, storage)
    different += [sentence for sentence in differences_of(first, second) if sentence not in different]
    pairs = compare_metrics(first.metrics, second.metrics)
    report = RepeatReport(
        run_id=run.run_id,
        repeat_of=first.run_id,
        differences=different,
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
    """Return the metrics of the splits val and test side by side, ordered by name."""
    names = sorted(name for name in before.keys() | now.keys() if name.startswith(COMPARED))
    return [MetricPair(metric=name, before=before.get(name), now=now.get(name)) for name in names]


def _same_weights(storage: Storage, one: RunRef, other: RunRef) -> bool:
    with TemporaryDirectory() as folder:
        files = [tracking.download_weights(storage, run, Path(folder)) for run in (one, other)]
        states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )
