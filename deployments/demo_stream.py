"""The stream of the demo: a table of new images, and the settings of the run of streaming inference on it."""

import hashlib
import io
from itertools import islice
from typing import Any

import pyarrow as pa
from PIL import Image, ImageOps

from tasks.refs import TEST
from tasks.schema import CHANGE_FEED, IMAGES_ARROW
from tasks.storage import Storage
from tasks.tables.direct_commits import append_rows
from tasks.tables.snapshots import latest, newest_snapshot, read_batches

DEPLOYMENT = "predict-stream/predict-stream"

NUM_IMAGES = 16

ARRIVALS = "arrivals"
"""Name of the table to which new images are added, as another program would."""

ARRIVALS_ARROW = pa.schema([IMAGES_ARROW.field(name) for name in ("sha256", "content")])


def add_arrivals(storage: Storage) -> str:
    """Write mirrored test images to a table of their own, unless it exists; return its path.

    The champion has predicted none of them: the stream has images to predict.
    """
    path = storage.table(ARRIVALS)
    if newest_snapshot(None, path) is not None:
        return path
    batches = read_batches(latest(None, storage.table("images")), ARRIVALS_ARROW, {"split": TEST}, NUM_IMAGES)
    images = (content for batch in batches for content in batch["content"].to_pylist())
    contents = [mirrored(content) for content in islice(images, NUM_IMAGES)]
    keys = [hashlib.sha256(content).hexdigest() for content in contents]
    append_rows(path, pa.table([keys, contents], schema=ARRIVALS_ARROW), {CHANGE_FEED: "true"})
    return path


def mirrored(content: bytes) -> bytes:
    """Return an encoded image, mirrored, as PNG."""
    with Image.open(io.BytesIO(content)) as image, io.BytesIO() as file:
        ImageOps.mirror(image.convert("RGB")).save(file, "PNG")
        return file.getvalue()


def stream_parameters(table: str, tables: str, model: str) -> dict[str, Any]:
    """Return the parameters of a run that predicts the new rows of a table.

    Args:
        table: Path of the table.
        tables: Name of the demo's tables, beside which the predictions are.
        model: Name of the registered model: the table was not made by the flow etl, which would give it one.
    """
    return {"config": {"model_name": model, "tables": tables, "predict": {"table": table}}}
