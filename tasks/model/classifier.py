"""The classifier of encoded images in a model package, shared by batch inference, streaming and serving."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch

from tasks.decode import BadImage, decode_pixels
from tasks.model.fold import fold_batch_norm
from tasks.model.network import Classifier, build_classifier
from tasks.model.package import DESCRIPTION_FILE, WEIGHTS_FILE, Description, read_description
from tasks.model.weights import WithoutMemory, load_state


@dataclass(frozen=True)
class Prediction:
    """The label of one image and its probability (0-1), or the error."""

    label: str | None
    probability: float | None
    error: str | None


class ImageClassifier:
    """A trained classifier of encoded images."""

    def __init__(self, classifier: Classifier, classes: Sequence[str], image_size: int, device: torch.device) -> None:
        self._classifier = fold_batch_norm(classifier.to(device))
        self.classes = tuple(classes)
        self.image_size = image_size
        self._device = device

    def predict(self, contents: Sequence[bytes]) -> list[Prediction]:
        """Decode and predict each image; an image that cannot be decoded gets an error and affects no other.

        Args:
            contents: Contents of image files.
        """
        predictions: list[Prediction | None] = [None] * len(contents)
        images = []
        places = []
        for place, content in enumerate(contents):
            try:
                images.append(decode_pixels(content, self.image_size))
                places.append(place)
            except BadImage as bad:
                predictions[place] = Prediction(None, None, str(bad))
        if images:
            images_BHWC = torch.from_numpy(np.stack(images)).to(self._device)
            with torch.inference_mode():
                probabilities_BK = torch.softmax(self._classifier(images_BHWC).float(), dim=1).cpu()
            best_B, index_B = probabilities_BK.max(dim=1)
            for place, probability, index in zip(places, best_B.tolist(), index_B.tolist(), strict=True):
                predictions[place] = Prediction(self.classes[index], probability, None)
        return [prediction for prediction in predictions if prediction is not None]

    def predict_frame(self, contents: pd.Series) -> pd.DataFrame:
        """Return the columns label, probability and error, with one row per encoded image of `contents`."""
        predictions = self.predict(list(contents))
        return pd.DataFrame(
            {
                "label": [prediction.label for prediction in predictions],
                "probability": [prediction.probability for prediction in predictions],
                "error": [prediction.error for prediction in predictions],
            },
            index=contents.index,
        )

    def logits(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, K), of uint8 images (B, H, W, 3) on any device."""
        return self._classifier(images_BHWC.to(self._device)).float()  # type: ignore[no-any-return]  # torch does not type it

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a classifier written by `save_classifier`, without running code from its files.

        Raises:
            WrongInput: The files are not a valid model package.
        """
        description = read_description(folder)
        build = partial(build_classifier, description.model, "none", len(description.classes), freeze_backbone=False)
        with WithoutMemory():  # A description of a kilobyte may name the largest network with a million classes.
            expected = build()
        state = load_state(folder, expected)
        classifier = build()
        classifier.load_state_dict(state)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(classifier, description.classes, description.image_size, device)


def save_classifier(folder: Path, model: str, state: dict[str, Any], classes: Sequence[str], image_size: int) -> None:
    """Write the weights and the description of a classifier to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / WEIGHTS_FILE)
    description = Description(model=model, classes=tuple(classes), image_size=image_size)
    (folder / DESCRIPTION_FILE).write_text(description.model_dump_json(indent=2))
