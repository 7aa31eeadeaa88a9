"""The verdict of a cache: features as in training, the probe on them, and the speed of fine-tuning all layers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tasks.cache.manifest import CacheManifest, open_cache
from tasks.checks.sanity import first_batches
from tasks.collectives.reducer import Reducer
from tasks.config.pipeline import features_obstacle
from tasks.config.recipe import UNPLANNED, Phase, phases_of
from tasks.config.train import TrainConfig
from tasks.environment import given_threads
from tasks.model.device import make_deterministic
from tasks.model_package.serving import is_out_of_memory
from tasks.refs import TEST, TRAIN, VAL, CacheRef, Verdict
from tasks.storage import Storage
from tasks.system.cores import num_cores
from tasks.train.context import TrainingContext
from tasks.train.features import materialize_features, read_features
from tasks.train.phases import trains_on_features
from tasks.train.plan import image_seconds
from tasks.train.spec import TrainingSpec
from tasks.verdict.outlook import make_verdict
from tasks.verdict.page import draw_verdict, verdict_markdown
from tasks.verdict.probe import Features, Labels, judge

logger = logging.getLogger("lakevision.verdict")

MAX_IMAGES = 4000
"""Images that are judged; of more, a random sample, from whose curve the accuracy is extrapolated."""

CPU_BATCH = 8
"""Maximum number of images of a step on a CPU that measures the speed of fine-tuning."""


def judge_cache(train: TrainConfig, cache: CacheRef, storage: Storage) -> tuple[Verdict, str]:
    """Return the verdict of a training run, and its page as Markdown; without a verdict, the page is empty.

    The split `test` is not read: the answers are those of cross-validation within `train` and `val`. The training run
    finds the features, which are not computed twice.

    Args:
        train: Settings of the training run.
        cache: Cache of its images.
        storage: Storage of the features.

    Raises:
        WrongInput, TimeLimitExceeded: As `first_batches`.
        CacheDamaged: The cache was changed or removed.
        DiskFull: As `materialize_features`.
    """
    manifest = open_cache(cache)
    rows = {split: part.rows for split, part in manifest.splits.items()}
    reason = features_obstacle(train) or ("the split `train` has fewer than 2 images" if rows[TRAIN] < 2 else None)
    found = None if reason else features_and_speed(train, cache, manifest, storage)
    torch.cuda.empty_cache()  # The training run may be on the same GPU.
    if found is None:
        of_model = f"the head of '{train.model}' is not its last layer, so that its features are not cached"
        return Verdict(line=f"none: {reason or of_model}"), ""
    features_NF, labels_N, speed = found
    judged = judge(features_NF, labels_N, train.seed)
    verdict, curves = make_verdict(judged, manifest.classes, rows[TRAIN], max(1, rows[TEST]), speed, train.seed)
    return verdict, verdict_markdown(verdict, draw_verdict(verdict, curves, judged, manifest.classes, rows[TRAIN]))


@contextmanager
def as_in_training(
    train: TrainConfig, cache: CacheRef, manifest: CacheManifest, storage: Storage
) -> Iterator[tuple[TrainingContext, Phase, int]]:
    """Yield the context of a training run, its phase of all layers, and the number of images in its first batch.

    Threads, memory format and kernels are those of training, on which the last digits of its features depend.

    Raises:
        WrongInput, CacheDamaged, TimeLimitExceeded: As `first_batches`.
    """
    torch.set_num_threads(train.num_threads or given_threads() or num_cores())
    whole = train.model_copy(update={"recipe": "finetune", "freeze_backbone": None, "fine_tune": []})
    phase = phases_of(whole, UNPLANNED)[-1]
    with first_batches(whole, phase, cache, 1) as setup:
        setup.classifier.to(memory_format=torch.channels_last)
        device = setup.batches[0][0].device
        make_deterministic(device)
        spec = TrainingSpec(train=train, cache=cache, storage=storage)
        yield TrainingContext(spec, manifest, setup.classifier, device, Reducer()), phase, len(setup.batches[0][1])


def features_and_speed(
    train: TrainConfig, cache: CacheRef, manifest: CacheManifest, storage: Storage
) -> tuple[Features, Labels, float | None] | None:
    """Return features, labels, and images per second of fine-tuning; None if the model's head takes no features."""
    with as_in_training(train, cache, manifest, storage) as (context, phase, batch):
        if not trains_on_features(context):
            return None
        url, features = materialize_features(context, (TRAIN, VAL))
        inputs_NF, labels_N = read_features(url, features, train.seed, MAX_IMAGES)
        return inputs_NF.numpy(), labels_N.numpy(), fine_tuning_speed(context, phase, batch)


def fine_tuning_speed(context: TrainingContext, phase: Phase, batch: int) -> float | None:
    """Return the images per second of training all layers, or None if a step does not fit into memory."""
    if context.device.type == "cpu":  # A small batch is as fast there, and leaves memory to others.
        batch = min(batch, CPU_BATCH)
    try:
        return round(1 / image_seconds(context, phase, batch), 2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("the speed of fine-tuning is unknown: a step of train.batch_size images needs more memory")
        return None
