"""The classifier of encoded images: predictions, errors of invalid images, saving and loading."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.decode import decode_pixels
from tasks.model.classifier import DESCRIPTION_FILE, WEIGHTS_FILE, ImageClassifier, Prediction, save_classifier
from tasks.model.network import Classifier, build_classifier

CPU = torch.device("cpu")
MODEL = "shufflenet_v2_x0_5"
CLASSES = ("ant", "bee", "cat")
SIDE = 32
BAD = {"text": b"no image", "empty": b"", "cut": b"\x89PNG\r\n\x1a\n\x00\x00"}


def image(number: int) -> bytes:
    """Return an encoded image of noise whose size depends on the number."""
    samples = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(samples).save(buffer, format="PNG")
    return buffer.getvalue()


def new_classifier(model: str = MODEL) -> Classifier:
    """Return a classifier of seeded random weights whose predictions differ between images of noise."""
    torch.manual_seed(4)
    classifier = build_classifier(model, "none", len(CLASSES), freeze_backbone=False)
    with torch.no_grad():
        for parameter in classifier.head.parameters():
            parameter.normal_(std=1.0)
    return classifier


@pytest.fixture(scope="module")
def model() -> ImageClassifier:
    """A classifier as after a training run, with non-default batch norm statistics."""
    classifier = new_classifier().train()
    with torch.no_grad():
        classifier(torch.from_numpy(np.stack([decode_pixels(image(number), SIDE) for number in range(8)])))
    return ImageClassifier(classifier, CLASSES, SIDE, CPU)


def alike(first: Prediction, second: Prediction) -> bool:
    """Return whether two predictions have the same label and, up to rounding, the same probability."""
    return first.label == second.label and first.probability == pytest.approx(second.probability, abs=1e-5)


def test_prediction_is_a_label_and_its_probability(model: ImageClassifier) -> None:
    """A prediction is the most probable class with its softmax probability."""
    (found,) = model.predict([image(1)])

    with torch.no_grad():
        logits = model._classifier(torch.tensor(decode_pixels(image(1), SIDE)[None]))
    probabilities = torch.softmax(logits[0], dim=0)
    assert found.error is None
    assert found.label == CLASSES[int(probabilities.argmax())]
    assert found.probability == pytest.approx(float(probabilities.max()), abs=1e-6)


def test_predictions_are_in_the_order_of_the_images(model: ImageClassifier) -> None:
    """The predictions of a batch equal those of each image alone, in the same order."""
    contents = [image(number) for number in range(12)]

    together = model.predict(contents)

    assert len(together) == 12
    assert all(alike(found, model.predict([content])[0]) for found, content in zip(together, contents, strict=True))
    assert len({found.probability for found in together}) > 1


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_invalid_image_gets_an_error_and_does_not_affect_others(model: ImageClassifier, bad: bytes) -> None:
    """An invalid file in a batch gets an error, and the others are predicted as without it."""
    first, broken, second = model.predict([image(1), bad, image(2)])

    assert (broken.label, broken.probability) == (None, None)
    assert broken.error
    assert alike(first, model.predict([image(1)])[0])
    assert alike(second, model.predict([image(2)])[0])


def test_error_begins_with_the_reason(model: ImageClassifier) -> None:
    """An error begins with the reason code, as in the ledger of ETL."""
    (found,) = model.predict([b""])

    assert found == Prediction(None, None, "zero_bytes: the file is empty")


def test_batch_without_valid_images_is_predicted(model: ImageClassifier) -> None:
    """A batch of invalid images gives one error per image, and an empty batch gives an empty list."""
    found = model.predict(list(BAD.values()))

    assert len(found) == len(BAD)
    assert all(prediction.error for prediction in found)
    assert model.predict([]) == []


@pytest.mark.parametrize("name", [MODEL, "squeezenet1_1", "mobilenet_v2"])
def test_saved_and_loaded_model_predicts_the_same(tmp_path: Path, name: str) -> None:
    """A loaded model has the same weights, classes and image size, and exactly equal predictions."""
    classifier = new_classifier(name)
    contents = [image(number) for number in range(3)] + [b"bad"]
    expected = ImageClassifier(classifier, CLASSES, 64, CPU).predict(contents)

    save_classifier(tmp_path / "model", name, classifier.state_dict(), CLASSES, 64)
    loaded = ImageClassifier.load(tmp_path / "model")

    assert (loaded.classes, loaded.image_size) == (CLASSES, 64)
    assert loaded.predict(contents) == expected


def test_saved_model_has_two_files(tmp_path: Path) -> None:
    """A saved model is a file of tensors that loads without running code, and a description in JSON."""
    save_classifier(tmp_path, MODEL, new_classifier().state_dict(), CLASSES, SIDE)

    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([WEIGHTS_FILE, DESCRIPTION_FILE])
    assert torch.load(tmp_path / WEIGHTS_FILE, weights_only=True)
    description = json.loads((tmp_path / DESCRIPTION_FILE).read_text())
    assert description == {"model": MODEL, "classes": list(CLASSES), "image_size": SIDE}


def test_model_with_frozen_backbone_is_loaded(tmp_path: Path) -> None:
    """A model package does not depend on whether the backbone was frozen in training."""
    torch.manual_seed(4)
    frozen = build_classifier(MODEL, "none", len(CLASSES), freeze_backbone=True)
    expected = ImageClassifier(frozen, CLASSES, SIDE, CPU).predict([image(1)])

    save_classifier(tmp_path, MODEL, frozen.state_dict(), CLASSES, SIDE)

    assert ImageClassifier.load(tmp_path).predict([image(1)]) == expected
