"""A frozen backbone runs once an image, not once an image and epoch: its features are a cache like any other."""

import hashlib
import json
import logging
from contextlib import ExitStack

import fsspec
import torch

from tasks.cache.in_memory import IN_MEMORY_BYTES, InMemoryLoader
from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import (
    FORMAT,
    CacheDamaged,
    CacheManifest,
    CacheSplit,
    FeatureSettings,
    check_files,
    read_manifest,
    write_manifest,
)
from tasks.cache.sizes import check_disk
from tasks.cache.sweep import discard, remove_unnamed
from tasks.collectives import Reducer
from tasks.model.fold import fold_batch_norm
from tasks.model.network import Classifier
from tasks.model.precision import precision_name
from tasks.model.transforms import IMAGENET_MEAN, IMAGENET_STD
from tasks.progress.count import counted
from tasks.refs import CacheRef
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.train.feature_files import feature_rows_per_group, head_inputs, write_share
from tasks.train.rank_zero import run_on_rank_zero

logger = logging.getLogger("lakevision.train")

FORM = 2
"""Of the folded network: raised by whoever changes what `fold_batch_norm` computes. 2: activated convolutions."""


def sample_images(side: int) -> torch.Tensor:
    """Return two images of noise, uint8 (2, side, side, 3), the same every time: for `ends_in_head`."""
    return torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def ends_in_head(classifier: Classifier, images_BHWC: torch.Tensor) -> bool:
    """Say whether the logits are exactly the head's output on a flat vector, so that features stand for images.

    Tried on images, not guessed: squeezenet, for one, pools after its last layer.
    """
    with head_inputs(classifier) as seen:
        outputs: list[torch.Tensor] = []
        handle = classifier.head.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            with torch.no_grad():
                logits = classifier.eval()(images_BHWC)
        finally:
            handle.remove()
    return (
        len(seen) == len(outputs) == 1
        and seen[0].ndim == 2
        and outputs[0].shape == logits.shape
        and bool(torch.equal(outputs[0].float(), logits))
    )


def backbone_digest(name: str, classifier: Classifier) -> str:
    """Return the sha256 of architecture and weights, the head's left out."""
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
    """Run the backbone over the images of some splits, or find that done; every rank calls this and does its share.

    Args:
        name: Architecture of the classifier.
        classifier: Its backbone is what runs; it is not changed.
        source: Cache of the images, whose manifest is `images`.
        images: See `source`.
        splits: What is made.
        folder: Folder or URL of the caches.
        device: Where the backbone runs.
        precision: Number format it computes in; None is that of its weights. Features are float32 in any case.
        reducer: The other ranks.

    Returns:
        URL and manifest of the cache with the features.

    Raises:
        WrongInput: The disk has no room for them.
        DiskFull: The disk was full before they were whole; nothing of them is left.
    """
    size = images.image_size
    with head_inputs(classifier) as seen, torch.no_grad():
        classifier.eval()(torch.zeros(1, size, size, 3, dtype=torch.uint8, device=device))
    settings = FeatureSettings(
        source=source.digest,
        backbone=backbone_digest(name, classifier),
        precision=precision_name(precision, device),
        device=device.type,
        transform=(IMAGENET_MEAN, IMAGENET_STD),
        num_features=seen[0].shape[1],
        form=FORM,
    )
    decisive = {"format": FORMAT, "features": settings.model_dump(), "splits": splits}
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
    url = f"{folder.rstrip('/')}/{key}"
    with translate_disk_full(folder), ExitStack() as stack:

        def look() -> CacheManifest | None:
            stack.enter_context(exclusive_lock(url))  # Another training may be making them.
            return _whole(url, settings)

        found = run_on_rank_zero(reducer, look)
        if found is not None:
            logger.info("%s has the features of this backbone already", url)
            return url, found
        if reducer.rank == 0:
            discard(url)  # What a killed or damaged build left.
            num_images = sum(images.splits[split].rows for split in splits)
            check_disk(url, num_images * (4 * settings.num_features + 16), "set train.feature_cache to false")
            logger.info("%s: the frozen backbone runs over %d images, once", url, num_images)
            filesystem, root = fsspec.core.url_to_fs(url)
            filesystem.makedirs(root, exist_ok=True)
            stack.callback(_discard_half, url)
            stack.enter_context(counted("features", num_images))
        reducer.broadcast(None)  # The folder is there.
        backbone = fold_batch_norm(classifier)
        backbone.precision = precision
        written = {
            split: write_share(backbone, source.url, images, split, url, device, reducer, settings) for split in splits
        }
        everyone = [reducer.broadcast(written, rank) for rank in range(reducer.num_ranks)]
        manifest = images.model_copy(
            update={
                "features": settings,
                "splits": {
                    split: CacheSplit(
                        rows=images.splits[split].rows,
                        rows_per_group=feature_rows_per_group(images.splits[split].rows, settings),
                        files=tuple(file for own in everyone for file in own[split]),
                    )
                    for split in splits
                },
            }
        )
        if reducer.rank == 0:
            remove_unnamed(url, manifest)
            write_manifest(url, manifest)
            logger.info("%s: features of %d images", url, sum(part.rows for part in manifest.splits.values()))
        reducer.broadcast(None)  # Whole before any rank reads it.
    return url, manifest


def _discard_half(url: str) -> None:
    if read_manifest(url) is None:
        discard(url)


def _whole(url: str, settings: FeatureSettings) -> CacheManifest | None:
    manifest = read_manifest(url)
    if manifest is None or manifest.features != settings:
        return None
    try:
        check_files(url, manifest)
    except CacheDamaged as damage:
        logger.warning("%s: it will be built again", damage)
        return None
    return manifest


def feature_loader(
    url: str, manifest: CacheManifest, split: str, batch_size: int, *, seed: int | None, rank: int, num_ranks: int
) -> CacheLoader:
    """Return the loader of features: from memory where they are few enough, else from the cache."""
    held = manifest.splits[split].rows * manifest.row_bytes <= IN_MEMORY_BYTES
    return (InMemoryLoader if held else CacheLoader)(
        url, manifest, split, batch_size, seed=seed, rank=rank, num_ranks=num_ranks
    )
