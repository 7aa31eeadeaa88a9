"""The published recipe's reader: petastorm's loader with its defaults, JPEG decoded in a TransformSpec."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from petastorm import make_batch_reader
from petastorm.pytorch import DataLoader
from petastorm.transform import TransformSpec
from PIL import Image

SIDE = 224


def _decode(frame: Any) -> Any:
    frame["pixels"] = frame["content"].map(lambda content: np.asarray(Image.open(io.BytesIO(content))))
    return frame.drop(columns="content")


SPEC = TransformSpec(
    _decode, edit_fields=[("pixels", np.uint8, (SIDE, SIDE, 3), False)], selected_fields=["pixels", "label"]
)


def read_recipe(folder: Path, batch_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the batches of an epoch: `pixels`, uint8 (B, SIDE, SIDE, 3), and `label`, int64 (B,)."""
    files = [f"file://{file}" for file in sorted(folder.glob("*.parquet"))]
    with (
        make_batch_reader(files, transform_spec=SPEC, num_epochs=1, seed=seed) as reader,
        DataLoader(reader, batch_size=batch_size) as loader,
    ):
        yield from loader
