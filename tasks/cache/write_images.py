"""Writing of images to cache files in a Spark task; ranks, which write features, need neither Spark nor a decoder."""

import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image
from pyspark import Accumulator

from tasks.cache.manifest import CacheFile, QuarantinedImage
from tasks.cache.write import RowFileWriter, cache_schema
from tasks.config.cache import CacheConfig
from tasks.model_package.decode import decode_pixels, encode_jpeg
from tasks.model_package.description import Decoding
from tasks.model_package.reasons import BadImage, Reason
from tasks.spark.worker_log import EndedParts, WorkerCount, log_from_worker

WRITTEN_COLUMNS = "split string, file string, quarantined string"
"""Columns of a Spark task's report: a `CacheFile` that it wrote, or a `QuarantinedImage` that it did not, as JSON."""


def image_schema(cache_config: CacheConfig) -> pa.Schema:
    """Return the schema of a file with images in the format of the cache."""
    return cache_schema(cache_config.pixel_bytes if cache_config.format == "uint8" else None)


def encode_pixels(pixels: npt.NDArray[np.uint8], cache_config: CacheConfig) -> bytes:
    """Return the content of one image, uint8 HWC, in the format of the cache."""
    if cache_config.format == "uint8":
        return pixels.tobytes()
    # Chroma subsampling as in nearly every photo that is read.
    return encode_jpeg(Image.fromarray(pixels), cache_config.jpeg_quality, "4:2:0")


def make_writer(
    url: str,
    cache_config: CacheConfig,
    decoding: Decoding,
    rows_per_group: Mapping[str, int],
    rows_per_file: Mapping[str, int],
    ended: Accumulator[EndedParts] | None = None,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow`.

    It takes batches of (split, file, sha256, label_index, content), sorted by split and row, with all rows of a file in
    one task. It yields rows of WRITTEN_COLUMNS, and adds each task that ends to `ended`.
    """
    driver = os.getpid()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = WorkerCount("cache", driver, ended)
        written: list[tuple[str, CacheFile]] = []
        bad: list[QuarantinedImage] = []
        images = (image for batch in batches for image in batch.to_pylist())
        for (split, number), of_file in itertools.groupby(images, operator.itemgetter("split", "file")):
            writer = RowFileWriter(url, split, number, image_schema(cache_config), rows_per_group[split])
            for row, image in enumerate(of_file, number * rows_per_file[split]):
                count.add(1)
                try:
                    pixels = decode_pixels(image["content"], cache_config.image_size, decoding)
                except BadImage as error:
                    if error.reason is Reason.UNREADABLE:
                        raise  # Memory ran out: a retry may decode it.
                    bad.append(QuarantinedImage(sha256=image["sha256"], split=split, reason=str(error)))
                else:
                    writer.add(encode_pixels(pixels, cache_config), image["label_index"], row)
            written.append((split, writer.close()))
        count.close()
        if written:
            log_from_worker(f"wrote {len(written)} cache files, {sum(file.rows for _, file in written)} images")
            files = [{"split": each, "file": file.model_dump_json(), "quarantined": None} for each, file in written]
            refused = [{"split": each.split, "file": None, "quarantined": each.model_dump_json()} for each in bad]
            yield pa.RecordBatch.from_pylist([*files, *refused])

    return write
