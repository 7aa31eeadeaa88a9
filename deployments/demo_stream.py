"""The stream of the demo: new image files in a folder, and one run of streaming inference that predicts them."""

import io
import os
from pathlib import Path

import pyarrow as pa
from PIL import Image, ImageOps

from tasks.schema import IMAGES_ARROW, TEST
from tasks.storage import Storage
from tasks.tables.snapshots import latest, read_batches

NUM_ARRIVALS = 16

ARRIVALS = "arrivals"
"""Name of the folder in the home into which new image files arrive."""

CONTENT_ARROW = pa.schema([IMAGES_ARROW.field("content")])


def write_arrivals(storage: Storage) -> Path:
    """Write mirrored test images as new files into the folder that the stream reads; return the folder.

    No such file is in the table, so that the stream has images to predict. A second call writes the same files.

    Args:
        storage: Location of the table `images`, and of the folder.
    """
    folder = Path(storage.home) / ARRIVALS
    folder.mkdir(parents=True, exist_ok=True)
    (rows, *_) = read_batches(latest(None, storage.table("images")), CONTENT_ARROW, {"split": TEST}, NUM_ARRIVALS)
    for number, content in enumerate(rows["content"].to_pylist()):
        file, partial = folder / f"{number:02}.png", folder / f".{number:02}.partial"
        if not file.exists():
            with Image.open(io.BytesIO(content)) as image:
                ImageOps.mirror(ImageOps.exif_transpose(image).convert("RGB")).save(partial, "PNG")
            # Renamed when it is whole: a stream reads a file as soon as it has its name.
            os.replace(partial, file)
    return folder
