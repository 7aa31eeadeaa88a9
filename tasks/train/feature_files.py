"""What each rank writes of the features of a frozen backbone: a file a split, with its share of the row groups."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheFile, CacheManifest, FeatureSettings
from tasks.cache.sizes import FEATURE_GROUP_BYTES, rows_in_group
from tasks.cache.write import RowFileWriter
from tasks.collectives import Reducer
from tasks.model.network import Classifier
from tasks.progress.count import advance
from tasks.schema import cache_schema

logger = logging.getLogger("lakevision.train")

BATCH = 64
"""Images a pass of the backbone: its own number, so that features do not depend on the training's batch size."""

TELL_SECONDS = 30.0
"""Between two lines that say how far the features are: of a million images, a CPU makes them for hours."""


@contextmanager
def head_inputs(classifier: Classifier) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which every forward pass adds what the head was given."""
    seen: list[torch.Tensor] = []
    handle = classifier.head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def feature_rows_per_group(rows: int, settings: FeatureSettings) -> int:
    """Return how many of a split's rows a row group of features has."""
    return rows_in_group(rows, 4 * settings.num_features, FEATURE_GROUP_BYTES)


def write_share(
    backbone: Classifier,
    source_url: str,
    images: CacheManifest,
    split: str,
    url: str,
    device: torch.device,
    reducer: Reducer,
    settings: FeatureSettings,
) -> list[CacheFile]:
    """Write this rank's row groups of a split; they are whole but for the very last, so that files can be joined.

    Rank 0 says now and then how far it is.
    """
    rows = images.splits[split].rows
    in_group = feature_rows_per_group(rows, settings)
    num_groups = -(-rows // in_group)
    begin, end = (
        min(rows, num_groups * number // reducer.num_ranks * in_group) for number in (reducer.rank, reducer.rank + 1)
    )
    if begin == end:
        return []
    loader = CacheLoader(source_url, images, split, BATCH)
    schema = cache_schema(4 * settings.num_features, "features")
    writer = RowFileWriter(url, split, reducer.rank, schema, in_group)
    began = told = time.monotonic()
    try:
        with head_inputs(backbone) as seen, torch.inference_mode():
            for batch in loader.epoch(0, begin):
                backbone(batch.inputs.to(device, non_blocking=True))
                features = seen.pop().float().cpu().numpy()
                for vector, label, row in zip(features, batch.labels_B.tolist(), batch.rows_B.tolist(), strict=True):
                    if row < end:
                        writer.add_content(vector.tobytes(), label, row)
                last = int(batch.rows_B[-1])
                if last >= end - 1:
                    break
                # The other ranks' shares are as large, and about as far.
                advance("features", split, round(rows * (last + 1 - begin) / (end - begin)))
                now = time.monotonic()
                if reducer.rank == 0 and now - told >= TELL_SECONDS:
                    told = now
                    made, share = last + 1 - begin, end - begin
                    logger.info(
                        "features of %d of %d images of the split '%s'%s, %.0f images/s",
                        *(made, share, split, " that are rank 0's" if reducer.num_ranks > 1 else ""),
                        made / (now - began),
                    )
        advance("features", split, rows)
        return [writer.close()]
    except BaseException:
        writer.abandon()
        raise
