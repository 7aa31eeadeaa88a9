"""The model package as a model of MLflow's flavor `python_function`, which loads this module by its name."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .classifier import ImageClassifier, Prediction
from .description import TOP_K

NO_INDEX = -1
"""Index of UNKNOWN, UNSURE and an error."""

NO_SCORE = -1.0
"""Score of an error, and of a model without thresholds."""

BATCH_SIZE = 64
"""Images per batch: the pixels and features of the 10,000 rows that Spark gives at once need gigabytes."""


class ImageModel:
    """Model from a column `content` of encoded images to the columns of a prediction.

    No value is missing, since `mlflow.pyfunc.spark_udf` writes None as a text and refuses it as a number. In place of
    None, label and error are empty, the index is NO_INDEX, the probability is 0 and the score is NO_SCORE.
    """

    def __init__(self, folder: Path) -> None:
        self._classifier = ImageClassifier.load(folder)

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Predict every row.

        Args:
            model_input: Column `content` with images as bytes, or as base64 text as in a request over HTTP.
            params: `top_k`, `min_probability` and `unknown_rate` of `ImageClassifier.predict`.

        Raises:
            ValueError: A text is not base64, or a parameter is out of range.
            TypeError: A value is neither bytes nor a text.
        """
        given = params or {}
        contents = [_content(value, place) for place, value in enumerate(model_input["content"])]
        top_k, min_probability = int(given.get("top_k", TOP_K)), float(given.get("min_probability", 0))
        settings = top_k, min_probability, float(given.get("unknown_rate", 0))
        predictions = [
            found
            for first in range(0, max(1, len(contents)), BATCH_SIZE)
            for found in self._classifier.predict(contents[first : first + BATCH_SIZE], *settings)
        ]
        return pd.DataFrame([_row(found) for found in predictions], columns=list(_row(Prediction(error=""))))


def _row(found: Prediction) -> dict[str, object]:
    return {
        "label": found.label or "",
        "index": NO_INDEX if found.index is None else found.index,
        "probability": found.probability or 0.0,
        "top_labels": list(found.top_labels),
        "top_probabilities": list(found.top_probabilities),
        "error": found.error or "",
        "unknown_score": NO_SCORE if found.unknown_score is None else found.unknown_score,
    }


def _content(value: object, place: int) -> bytes:
    """Return the bytes of an image."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise TypeError(f"row {place} of content is of type {type(value).__name__}: give bytes, or base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"row {place} of content is not base64 ({error}): give bytes, or base64 text") from None


def _load_pyfunc(data_path: str) -> ImageModel:
    """Load the model package in a folder; MLflow calls this function."""
    return ImageModel(Path(data_path))
