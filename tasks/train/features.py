"""Cached features of a frozen backbone, which runs once per image instead of once per image and epoch."""

import hashlib
import json
import logging
from contextlib import ExitStack

import torch
from pydantic import TypeAdapter

from tasks.broadcast import broadcast_value, wait_for_all
from tasks.cache.in_memory import IN_MEMORY_BYTES, InMemoryLoader
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
from tasks.cache.sizes import check_disk
from tasks.cache.sweep import discard, remove_unnamed
from tasks.cache.virtual_ranks import VirtualRanks
from tasks.collectives import Reducer
from tasks.config.frozen import hashed_settings
from tasks.model.network import Classifier
from tasks.model.precision import precision_name
from tasks.model_package.network import IMAGENET_MEAN, IMAGENET_STD
from tasks.model_package.serving import serving_network
from tasks.object_store import file_system
from tasks.progress.activity import waiting_for_process
from tasks.progress.count import counted
from tasks.refs import CacheRef
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.train.feature_files import feature_rows_per_group, head_inputs, write_share
from tasks.train.rank_zero import run_on_rank_zero

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
    with head_inputs(classifier) as vectors:
        outputs: list[torch.Tensor] = []
        handle = classifier.head.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            with torch.no_grad():
                logits = classifier.eval()(images_BHWC)
        finally:
            handle.remove()
    return (
        len(vectors) == len(outputs) == 1
        and vectors[0].ndim == 2
        and outputs[0].shape == logits.shape
        and bool(torch.equal(outputs[0].float(), logits))
    )


def backbone_digest(name: str, classifier: Classifier) -> str:
    """Return the sha256 of architecture and weights without the head."""
    head = {id(value) for value in classifier.head.state_dict(keep_vars=True).values()}
    digest = hashlib.sha256(name.encode())
    for key, value in classifier.network.state_dict(keep_vars=True).items():
        if id(value) not in head:
            digest.update(key.encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def materialize_features(
    name: str,
    classifier: Classifier,
    source: CacheRef,
    images: CacheManifest,
    splits: tuple[str, ...],
    folder: str,
    device: torch.device,
    precision: torch.dtype | None,
    reducer: Reducer,
) -> tuple[str, CacheManifest]:
    """Return cached features of the given splits, computed by all ranks together if they do not exist.

    Args:
        name: Architecture of the classifier.
        classifier: Classifier with the backbone; it is not changed.
        source: Cache of the images.
        images: Manifest of `source`.
        splits: Splits to compute features for.
        folder: Folder or URL of the caches.
        device: Device of the backbone.
        precision: Number format of the backbone; None is that of its weights. Features are float32 in any case.
        reducer: The other ranks.

    Returns:
        URL and manifest of the cache with the features.

    Raises:
        WrongInput: The disk has too little free space for the features.
        DiskFull: The disk became full before the features were complete; all partial files are removed.
    """
    size = images.image_size
    with head_inputs(classifier) as vectors, torch.no_grad():
        classifier.eval()(torch.zeros(1, size, size, 3, dtype=torch.uint8, device=device))
    settings = FeatureSettings(
        source=source.digest,
        backbone=backbone_digest(name, classifier),
        precision=precision_name(precision, device),
        device=device.type,
        transform=(IMAGENET_MEAN, IMAGENET_STD),
        num_features=vectors[0].shape[1],
        form=FORM,
    )
    decisive = {"format": FORMAT, "features": hashed_settings(settings, type(settings).model_fields), "splits": splits}
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
    url = f"{folder.rstrip('/')}/{key}"
    with translate_disk_full(folder), ExitStack() as stack:

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
        backbone.precision = precision
        written = {
            split: write_share(backbone, source.url, images, split, url, device, reducer, settings) for split in splits
        }
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


def feature_loader(
    url: str,
    manifest: CacheManifest,
    split: str,
    batch_size: int,
    *,
    seed: int | None,
    ranks: VirtualRanks = VirtualRanks(),
) -> CacheLoader:
    """Return a loader of features: from memory if they fit, else from the cache."""
    fits_in_memory = manifest.splits[split].rows * manifest.row_bytes <= IN_MEMORY_BYTES
    return (InMemoryLoader if fits_in_memory else CacheLoader)(
        url,
        manifest,
        split,
        batch_size,
        seed=seed,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        num_virtual=ranks.num_virtual,
    )
