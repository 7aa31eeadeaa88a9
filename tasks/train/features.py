"""Cached features of a frozen backbone, which runs once per image instead of once per image and epoch."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import (
    FORMAT,
    CacheDamaged,
    CacheFile,
    CacheManifest,
    CacheSplit,
    FeatureSettings,
    check_files,
    read_manifest,
    write_manifest,
)
from tasks.cache.sweep import discard, remove_unnamed
from tasks.cache.write import FEATURE_GROUP_BYTES, RowFileWriter, cache_schema, check_disk, rows_in_group
from tasks.collectives.reducer import broadcast_value, run_on_rank_zero, wait_for_all
from tasks.config.frozen import hashed_settings
from tasks.model.precision import precision_name
from tasks.model.training_network import Classifier
from tasks.model_package.network import ImageNetwork
from tasks.model_package.serving import serving_network
from tasks.object_store import file_system
from tasks.progress.activity import stepping, waiting_for_process
from tasks.progress.count import advance, counted
from tasks.refs import TRAIN
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.train.context import TrainingContext

logger = logging.getLogger("lakevision.train")

FOUND: TypeAdapter[CacheManifest | None] = TypeAdapter(CacheManifest | None)
WRITTEN = TypeAdapter(dict[str, list[CacheFile]])
"""Types of what ranks tell each other: a complete cache, and the files of one rank by split."""

FORM = 3
"""Version of the folded network; increment it when `serving_network` changes. 2: activated, 3: packed convolutions."""


def sample_images(side: int) -> torch.Tensor:
    """Return two images of fixed noise for `ends_in_head`, uint8 (2, side, side, 3)."""
    return torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def ends_in_head(classifier: Classifier, images_BHWC: torch.Tensor) -> bool:
    """Return whether the logits are exactly the head's output on a flat vector, so that features can replace images.

    Determined by a forward pass: squeezenet, for example, pools after its last layer.
    """
    with head_passes(classifier) as passes, torch.no_grad():
        logits = classifier.eval()(images_BHWC)
    if len(passes) != 1:
        return False
    [(vectors, outputs)] = passes
    return vectors.ndim == 2 and outputs.shape == logits.shape and bool(torch.equal(outputs.float(), logits))


def backbone_digest(name: str, classifier: Classifier) -> str:
    """Return the sha256 of architecture and weights without the head."""
    head = {id(value) for value in classifier.head.state_dict(keep_vars=True).values()}
    digest = hashlib.sha256(name.encode())
    for key, value in classifier.network.state_dict(keep_vars=True).items():
        if id(value) not in head:
            digest.update(key.encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def materialize_features(context: TrainingContext, splits: tuple[str, ...]) -> tuple[str, CacheManifest]:
    """Return cached features of the given splits, computed by all ranks together if they do not exist.

    The features are those of the context's backbone, which is not changed, in its precision. They are float32 in any
    case, and in the folder of the caches.

    Args:
        context: The training run.
        splits: Splits to compute features for.

    Returns:
        URL and manifest of the cache with the features.

    Raises:
        WrongInput: The disk has too little free space for the features.
        DiskFull: The disk became full before the features were complete; all partial files are removed.
    """
    spec, images, classifier = context.spec, context.manifest, context.classifier
    device, reducer = context.device, context.reducer
    assert isinstance(classifier.head, nn.Linear), "a head on vectors is linear"
    settings = FeatureSettings(
        source=spec.cache.digest,
        backbone=backbone_digest(spec.train.model, classifier),
        precision=precision_name(context.precision, device),
        device=device.type,
        transform=(classifier.mean, classifier.std),
        num_features=classifier.head.in_features,
        form=FORM,
    )
    decisive = {"format": FORMAT, "features": hashed_settings(settings, type(settings).model_fields), "splits": splits}
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
    url = f"{spec.storage.cache.rstrip('/')}/{key}"
    with translate_disk_full(spec.storage.cache), ExitStack() as stack:

        def find_existing() -> CacheManifest | None:
            with waiting_for_process("waiting for a training run that computes the same features"):
                stack.enter_context(exclusive_lock(url))
            return _complete_features(url, settings)

        found = run_on_rank_zero(reducer, FOUND, find_existing)
        if found is not None:
            logger.info("%s already has the features of this backbone", url)
            return url, found
        if reducer.rank == 0:
            discard(url)  # Files of a killed build, or damaged ones.
            num_images = sum(images.splits[split].rows for split in splits)
            check_disk(url, num_images * (4 * settings.num_features + 16), "set train.feature_cache to false")
            logger.info("%s: running the frozen backbone over %d images, once", url, num_images)
            filesystem, root = file_system(url)
            filesystem.makedirs(root, exist_ok=True)
            stack.callback(_discard_partial, url)
            stack.enter_context(counted("features", num_images))
        wait_for_all(reducer)  # The other ranks wait until the folder exists.
        backbone = serving_network(classifier, "float32", temperature=1)
        backbone.precision = context.precision
        written = {split: write_share(backbone, context, split, url, settings) for split in splits}
        files_of_ranks = [broadcast_value(reducer, WRITTEN, written, rank) for rank in range(reducer.num_ranks)]
        manifest = images.model_copy(
            update={
                "features": settings,
                "splits": {
                    split: CacheSplit(
                        rows=images.splits[split].rows,
                        rows_per_group=feature_rows_per_group(images.splits[split].rows, settings),
                        files=tuple(file for files in files_of_ranks for file in files[split]),
                    )
                    for split in splits
                },
            }
        )
        if reducer.rank == 0:
            remove_unnamed(url, manifest)
            write_manifest(url, manifest)
            logger.info("%s: features of %d images", url, sum(part.rows for part in manifest.splits.values()))
        wait_for_all(reducer)  # The other ranks read only a complete cache.
    return url, manifest


def _discard_partial(url: str) -> None:
    if read_manifest(url) is None:
        discard(url)


def _complete_features(url: str, settings: FeatureSettings) -> CacheManifest | None:
    manifest = read_manifest(url)
    if manifest is None or manifest.features != settings:
        return None
    try:
        check_files(url, manifest)
    except CacheDamaged as damage:
        logger.warning("%s: it will be rebuilt", damage)
        return None
    return manifest


class StandardizedHead(nn.Module):
    """The head on features of mean 0 and standard deviation 1, so that one learning rate and decay suit all of them.

    Its weights are those of the head, in the standardized space until `fold`. A few images of a rare class are then
    told apart in a few epochs (tests/benchmarks/LOG.md).
    """

    def __init__(self, head: nn.Module, mean_F: torch.Tensor, deviation_F: torch.Tensor) -> None:
        """Move the head's weights into the standardized space.

        Args:
            head: Linear layer of F inputs, which is changed.
            mean_F: Mean of the features, float32 (F,), on the device of the head.
            deviation_F: Their standard deviation, of the same form.
        """
        super().__init__()
        assert isinstance(head, nn.Linear), "a head on vectors is linear"
        self.head, self._mean_F, self._deviation_F = head, mean_F, deviation_F
        with torch.no_grad():
            head.bias.add_(head.weight @ mean_F)
            head.weight.mul_(deviation_F)

    def forward(self, features_BF: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 (B, K)."""
        logits_BK: torch.Tensor = self.head((features_BF - self._mean_F) / self._deviation_F)
        return logits_BK

    @torch.no_grad()
    def fold(self) -> None:
        """Give the head the weights for features as they are."""
        self.head.weight.div_(self._deviation_F)
        self.head.bias.sub_(self.head.weight @ self._mean_F)


def feature_statistics(url: str, manifest: CacheManifest, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the first STANDARDIZED_ROWS training images' features, float32 (F,)."""
    sums = torch.zeros((3, manifest.row_bytes // 4), dtype=torch.float64)
    for batch in CacheLoader(url, manifest, TRAIN, BATCH).epoch(0):
        values_BF = batch.inputs.double()
        sums += torch.stack([torch.ones_like(values_BF), values_BF, values_BF.square()]).sum(dim=1)
        if sums[0, 0] >= STANDARDIZED_ROWS:
            break
    count, total, squares = sums
    mean = total / count
    deviation = raised((squares / count - mean.square()).clamp(min=0).sqrt())
    return mean.float().to(device), deviation.float().to(device)


def raised(deviation_F: torch.Tensor) -> torch.Tensor:
    """Return deviations, of which none is 0."""
    return deviation_F + MIN_DEVIATION * deviation_F.mean() + 1e-12


def read_features(url: str, manifest: CacheManifest, seed: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features, float32 (N, F), and labels, int64 (N,), of a cache's splits; of more than `most`, a sample."""
    total = sum(part.rows for part in manifest.splits.values())
    chosen = np.zeros(total, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(total)[:most]] = True
    features, labels, begin = [], [], 0
    for split in manifest.splits:
        for batch in CacheLoader(url, manifest, split, 256).epoch(0):
            kept = np.flatnonzero(chosen[begin + batch.rows_B])
            features.append(batch.inputs[kept])
            labels.append(batch.labels_B[kept])
        begin += manifest.splits[split].rows
    return torch.cat(features), torch.cat(labels)


STANDARDIZED_ROWS = 20_000
"""Training images that mean and deviation of the features are taken from."""

MIN_DEVIATION = 1e-2
"""Added to the deviations, as a fraction of their mean: a feature that is nearly constant stays small."""

BATCH = 64
"""Images per batch of the backbone; fixed, so that features do not depend on `train.batch_size`."""

LOG_SECONDS = 30.0
"""Seconds between two log lines on progress; a CPU takes hours for the features of a million images."""


@contextmanager
def head_passes(classifier: ImageNetwork) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield a list to which every forward pass appends the input and the output of the head."""
    passes: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = classifier.head.register_forward_hook(lambda _module, inputs, output: passes.append((inputs[0], output)))
    try:
        yield passes
    finally:
        handle.remove()


def feature_rows_per_group(rows: int, settings: FeatureSettings) -> int:
    """Return the number of rows in a row group of features, for a split of `rows` rows."""
    return rows_in_group(rows, 4 * settings.num_features, FEATURE_GROUP_BYTES)


def write_share(
    backbone: ImageNetwork, context: TrainingContext, split: str, url: str, settings: FeatureSettings
) -> list[CacheFile]:
    """Write this rank's row groups of a split, and return the file; an empty list if the rank has none.

    All row groups but the last one of the split are full, so that the files can be concatenated. Rank 0 logs its
    progress.
    """
    images, reducer = context.manifest, context.reducer
    rows = images.splits[split].rows
    in_group = feature_rows_per_group(rows, settings)
    num_groups = -(-rows // in_group)
    begin, end = (
        min(rows, num_groups * number // reducer.num_ranks * in_group) for number in (reducer.rank, reducer.rank + 1)
    )
    if begin == end:
        return []
    loader = CacheLoader(context.spec.cache.url, images, split, BATCH, pin_memory=context.device.type == "cuda")
    schema = cache_schema(4 * settings.num_features, "features")
    writer = RowFileWriter(url, split, reducer.rank, schema, in_group)
    began = logged_at = time.monotonic()
    try:
        with (
            head_passes(backbone) as passes,
            torch.inference_mode(),
            stepping(f"computing features of '{split}'") as begin_step,
        ):
            for step, batch in enumerate(loader.epoch(0, begin)):
                begin_step(step)
                backbone(batch.inputs.to(context.device, non_blocking=True))
                # Of each pass over a part of the batch.
                features = torch.cat([vectors for vectors, _logits in passes]).float().cpu().numpy()
                passes.clear()
                for vector, label, row in zip(features, batch.labels_B.tolist(), batch.rows_B.tolist(), strict=True):
                    if row < end:
                        writer.add(vector.tobytes(), label, row)
                last = int(batch.rows_B[-1])
                if last >= end - 1:
                    break
                # Extrapolated from this rank: the shares of the others are as large, and progress alike.
                advance("features", split, round(rows * (last + 1 - begin) / (end - begin)))
                now = time.monotonic()
                if reducer.rank == 0 and now - logged_at >= LOG_SECONDS:
                    logged_at = now
                    done, share = last + 1 - begin, end - begin
                    logger.info(
                        "features of %d of %d images of the split '%s'%s, %.0f images/s",
                        *(done, share, split, " (the share of rank 0)" if reducer.num_ranks > 1 else ""),
                        done / (now - began),
                    )
        advance("features", split, rows)
        return [writer.close()]
    except BaseException:
        writer.abandon()
        raise
