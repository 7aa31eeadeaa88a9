"""Feature files: each rank runs the frozen backbone and writes its row groups of each split."""

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
from tasks.model_package.network import ImageNetwork
from tasks.progress.activity import stepping
from tasks.progress.count import advance
from tasks.schema import cache_schema

logger = logging.getLogger("lakevision.train")

BATCH = 64
"""Images per batch of the backbone; fixed, so that features do not depend on `train.batch_size`."""

LOG_SECONDS = 30.0
"""Seconds between two log lines on progress; a CPU takes hours for the features of a million images."""


@contextmanager
def head_inputs(classifier: ImageNetwork) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which every forward pass appends the input of the head."""
    inputs_of_head: list[torch.Tensor] = []
    handle = classifier.head.register_forward_pre_hook(lambda _module, inputs: inputs_of_head.append(inputs[0]))
    try:
        yield inputs_of_head
    finally:
        handle.remove()


def feature_rows_per_group(rows: int, settings: FeatureSettings) -> int:
    """Return the number of rows in a row group of features, for a split of `rows` rows."""
    return rows_in_group(rows, 4 * settings.num_features, FEATURE_GROUP_BYTES)


def write_share(
    backbone: ImageNetwork,
    source_url: str,
    images: CacheManifest,
    split: str,
    url: str,
    device: torch.device,
    reducer: Reducer,
    settings: FeatureSettings,
) -> list[CacheFile]:
    """Write this rank's row groups of a split, and return the file; an empty list if the rank has none.

    All row groups but the last one of the split are full, so that the files can be concatenated. Rank 0 logs its
    progress.
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
    began = logged_at = time.monotonic()
    try:
        with (
            head_inputs(backbone) as vectors,
            torch.inference_mode(),
            stepping(f"computing features of '{split}'") as begin_step,
        ):
            for step, batch in enumerate(loader.epoch(0, begin)):
                begin_step(step)
                backbone(batch.inputs.to(device, non_blocking=True))
                features = torch.cat(vectors).float().cpu().numpy()  # Of each pass over a part of the batch.
                vectors.clear()
                for vector, label, row in zip(features, batch.labels_B.tolist(), batch.rows_B.tolist(), strict=True):
                    if row < end:
                        writer.add_content(vector.tobytes(), label, row)
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
