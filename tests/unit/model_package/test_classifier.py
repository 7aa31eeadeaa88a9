"""The classifier of encoded images: predictions, errors of invalid images, saving and loading."""

import hashlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tasks.model.training_network import Classifier, build_classifier
from tasks.model_package.classifier import ImageClassifier, Prediction, save_classifier
from tasks.model_package.decode import decode_pixels
from tasks.model_package.description import AS_BEFORE, DESCRIPTION_FILE, RATES, WEIGHTS_FILE, InvalidPackage
from tasks.model_package.serving import PIXELS_PER_PASS, computes_bf16, serving_network
from tests.builders.image_classifier import image_classifier

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
    """Return a classifier as after a training run, with non-default batch norm statistics."""
    classifier = new_classifier().train()
    with torch.no_grad():
        classifier(torch.from_numpy(np.stack([decode_pixels(image(number), SIDE) for number in range(8)])))
    return image_classifier(classifier, CLASSES, SIDE)


def alike(first: Prediction, second: Prediction) -> bool:
    """Return whether two predictions have the same label and, up to rounding, the same probability."""
    return first.label == second.label and first.probability == pytest.approx(second.probability, abs=1e-5)


def test_prediction_is_a_label_and_its_probability(model: ImageClassifier) -> None:
    """A prediction is the most probable class with its softmax probability."""
    (found,) = model.predict([image(1)])

    with torch.no_grad():
        logits = model.logits(torch.tensor(decode_pixels(image(1), SIDE)[None]))
    probabilities = torch.softmax(logits[0], dim=0)
    assert found.error is None
    assert found.label == CLASSES[int(probabilities.argmax())]
    assert found.index == int(probabilities.argmax())
    assert found.probability == pytest.approx(float(probabilities.max()), abs=1e-6)


def test_batch_is_computed_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes as many images at once as have the pixels of a pass, the rest last, with the same logits."""
    images = torch.from_numpy(np.stack([decode_pixels(image(number), SIDE) for number in range(7)]))
    network = serving_network(new_classifier(), "float32", temperature=2.0)
    network.pixels_per_pass = None
    with torch.no_grad():
        whole = network(images)
    sizes: list[int] = []
    network.network.register_forward_pre_hook(lambda _module, inputs: sizes.append(len(inputs[0])))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    for images_per_thread, expected in ((1.5, [3, 3, 1]), (0.1, 7 * [1]), (8, [7])):
        network.pixels_per_pass = int(images_per_thread * SIDE * SIDE)
        sizes.clear()
        with torch.no_grad():
            logits = network(images)
        assert sizes == expected
        assert torch.allclose(logits, whole, atol=1e-5)
    assert serving_network(new_classifier(), "float32", temperature=2.0).pixels_per_pass == PIXELS_PER_PASS


def test_prediction_has_the_most_probable_classes(model: ImageClassifier) -> None:
    """The classes are in descending order of their probabilities, as many as asked for or as there are."""
    (two,) = model.predict([image(1)], top_k=2)
    (found,) = model.predict([image(1)])

    assert sorted(found.top_labels) == sorted(CLASSES)
    assert sum(found.top_probabilities) == pytest.approx(1)
    assert list(found.top_probabilities) == sorted(found.top_probabilities, reverse=True)
    assert (found.top_labels[0], found.top_probabilities[0]) == (found.label, found.probability)
    assert (two.top_labels, two.top_probabilities) == (found.top_labels[:2], found.top_probabilities[:2])


def test_improbable_label_is_unsure(model: ImageClassifier) -> None:
    """Below the given probability the label is `unsure`, without an index, and the classes are still listed."""
    (sure,) = model.predict([image(1)])
    assert sure.probability is not None
    (unsure,) = model.predict([image(1)], min_probability=sure.probability + 1e-6)

    assert unsure == replace(sure, label="unsure", index=None)
    assert model.predict([image(1)], min_probability=sure.probability) == [sure]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"top_k": 0}, "top_k is 0"), ({"min_probability": 1.5}, "min_probability is 1.5: give a number from 0 to 1")],
)
def test_settings_out_of_range_are_refused(model: ImageClassifier, settings: dict[str, Any], reason: str) -> None:
    """The number of classes is at least 1, and a probability is from 0 to 1."""
    with pytest.raises(ValueError, match=reason):
        model.predict([image(1)], **settings)


def test_class_named_unsure_allows_no_minimum() -> None:
    """A class with the name of the label `unsure` would make the two indistinguishable."""
    model = image_classifier(new_classifier(), ("ant", "bee", "unsure"), SIDE)

    assert model.predict([image(1)])[0].label in model.classes
    with pytest.raises(ValueError, match="but 'unsure' is a class of the model"):
        model.predict([image(1)], min_probability=0.5)


def with_thresholds(threshold: float, classes: tuple[str, ...] = CLASSES, temperature: float = 1.0) -> ImageClassifier:
    """Return a classifier with 1 as the threshold of the first rate, and this one as that of the others."""
    thresholds = (1.0, *(len(RATES) - 1) * [threshold])
    return image_classifier(new_classifier(), classes, SIDE, temperature=temperature, unknown_thresholds=thresholds)


def test_image_above_the_threshold_is_unknown() -> None:
    """The label has no index, and goes before `unsure`; score, probability and classes stay as they are."""
    plain = with_thresholds(0.0).predict([image(1), b""])
    ((first, broken), score) = plain, plain[0].unknown_score
    assert score is not None
    assert 0 < score < 1
    assert (first.label, broken.unknown_score) == (first.top_labels[0], None)

    model = with_thresholds(score - 1e-6)
    for min_probability in (0.0, 1.0):
        assert model.predict([image(1), b""], 5, min_probability, 0.05) == [
            replace(first, label="unknown", index=None),
            broken,
        ]
    (below,) = model.predict([image(1)], 5, 1.0, RATES[0])
    (equal,) = with_thresholds(score).predict([image(1)], 5, 0.0, 0.05)
    assert (below.label, equal) == ("unsure", first)


def test_score_does_not_depend_on_the_temperature(model: ImageClassifier) -> None:
    """It is that of the logits before they are divided; a model without thresholds has none."""
    images = [image(number) for number in range(4)]
    one, two = ([found.unknown_score for found in with_thresholds(0.5, temperature=t).predict(images)] for t in (1, 4))

    assert one == pytest.approx(two, abs=1e-6)
    assert len(set(one)) == len(images)
    assert [found.unknown_score for found in model.predict(images)] == 4 * [None]


def test_rate_that_the_model_cannot_use_is_refused(model: ImageClassifier) -> None:
    """The rate is in the model's table, the model has thresholds, and `unknown` is not a class."""
    for rate in (0.0001, 0.6, -1.0):
        with pytest.raises(ValueError, match=rf"unknown_rate is {rate}: give 0, or a rate from 0\.001 to 0\.5"):
            with_thresholds(0.5).predict([image(1)], unknown_rate=rate)
    with pytest.raises(ValueError, match=r"unknown_rate is 0\.05, but the model has no thresholds"):
        model.predict([image(1)], unknown_rate=0.05)
    named = with_thresholds(0.5, ("ant", "bee", "unknown"))
    assert named.predict([image(1)])[0].label in named.classes
    with pytest.raises(ValueError, match="but 'unknown' is a class of the model: give 0"):
        named.predict([image(1)], unknown_rate=0.05)


def test_temperature_changes_probabilities_but_not_labels() -> None:
    """The logits are divided by the temperature: 2 flattens the probabilities, the order stays."""
    plain, flat = (image_classifier(new_classifier(), CLASSES, SIDE, temperature=value) for value in (1.0, 2.0))

    for one, other in zip(plain.predict([image(1), image(2)]), flat.predict([image(1), image(2)]), strict=True):
        assert one.top_labels == other.top_labels
        logs = [[math.log(value) for value in found.top_probabilities] for found in (one, other)]
        assert logs[0][0] - logs[0][1] == pytest.approx(2 * (logs[1][0] - logs[1][1]), rel=1e-4)


@pytest.mark.skipif(not computes_bf16(CPU), reason="this CPU has no instructions for bfloat16")
def test_bfloat16_gives_the_same_answer_in_any_batch() -> None:
    """In bfloat16 a prediction does not depend on the other images of its batch, and is close to that in float32."""
    model = image_classifier(new_classifier(), CLASSES, 128, precision="bfloat16")
    exact = image_classifier(new_classifier(), CLASSES, 128)
    contents = [image(number) for number in range(20)]

    assert (model.precision, exact.precision) == ("bfloat16", "float32")
    found = model.predict(contents)
    assert found == [model.predict([content])[0] for content in contents]
    for one, other in zip(found, exact.predict(contents), strict=True):
        assert one.probability == pytest.approx(other.probability, abs=0.05)
        assert one.probability != other.probability


def test_device_without_bfloat16_serves_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was tested in bfloat16 is served in float32 where torch would emulate bfloat16."""
    monkeypatch.setattr("tasks.model_package.serving.computes_bf16", lambda device: False)

    model = image_classifier(new_classifier(), CLASSES, SIDE, precision="bfloat16")

    assert model.precision == "float32"
    assert model.predict([image(1)]) == image_classifier(new_classifier(), CLASSES, SIDE).predict([image(1)])


def test_batch_that_does_not_fit_into_memory_is_halved(model: ImageClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 20 is computed in halves until they fit, and a single image that does not fit is an error."""
    contents = [image(number) for number in range(20)]
    expected, sizes = model.predict(contents), []
    fits = 8
    network = model._network

    def limited(images_BHWC: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images_BHWC))
        if len(images_BHWC) > fits:
            raise RuntimeError("CUDA error: out of memory") if len(sizes) % 2 else torch.OutOfMemoryError
        return network(images_BHWC)  # type: ignore[no-any-return]  # torch does not type it

    monkeypatch.setattr(model, "_network", limited)

    assert all(alike(one, other) for one, other in zip(model.predict(contents), expected, strict=True))
    assert sizes == [20, 10, 5, 5, 10, 5, 5]
    fits = 0
    with pytest.raises(RuntimeError, match="memory|^$"):
        model.predict(contents)


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

    assert found == Prediction(None, None, None, (), (), "zero_bytes: the file is empty")


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
    thresholds = tuple(1 - rate for rate in RATES)
    given: dict[str, Any] = {"temperature": 2.0, "unknown_thresholds": thresholds}
    expected = image_classifier(classifier, CLASSES, 64, **given).predict(contents, unknown_rate=0.5)

    save_classifier(tmp_path / "model", name, classifier.state_dict(), CLASSES, 64, **given)
    loaded = ImageClassifier.load(tmp_path / "model", CPU)

    assert (loaded.classes, loaded.image_size, loaded.unknown_thresholds) == (CLASSES, 64, thresholds)
    assert loaded.predict(contents, unknown_rate=0.5) == expected
    assert [found.unknown_score is None for found in expected] == [False, False, False, True]


def test_saved_model_has_two_files(tmp_path: Path) -> None:
    """A saved model is a file of tensors that loads without running code, and a description in JSON."""
    save_classifier(tmp_path, MODEL, new_classifier().state_dict(), CLASSES, SIDE)

    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([WEIGHTS_FILE, DESCRIPTION_FILE])
    assert load_file(tmp_path / WEIGHTS_FILE)
    description = json.loads((tmp_path / DESCRIPTION_FILE).read_text())
    assert description == {
        "format": 2,
        "model": MODEL,
        "classes": list(CLASSES),
        "image_size": SIDE,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "precision": "float32",
        "temperature": 1.0,
        "weights_sha256": hashlib.sha256((tmp_path / WEIGHTS_FILE).read_bytes()).hexdigest(),
        "decoding": {"version": 3, "sample_bits": None},
        "unknown_thresholds": None,
    }


def test_model_of_an_earlier_release_predicts_as_before(tmp_path: Path) -> None:
    """A description without a decoding has the first version, and one of a later release is refused.

    Without thresholds, predictions have no score, and are otherwise the same.
    """
    thresholds = tuple(1 - rate for rate in RATES)
    save_classifier(tmp_path, MODEL, new_classifier().state_dict(), CLASSES, SIDE, unknown_thresholds=thresholds)
    (expected,) = ImageClassifier.load(tmp_path, CPU).predict([image(1)])
    assert expected.unknown_score is not None
    file = tmp_path / DESCRIPTION_FILE
    described = json.loads(file.read_text())
    del described["decoding"], described["unknown_thresholds"]

    file.write_text(json.dumps(described))
    earlier = ImageClassifier.load(tmp_path, CPU)
    assert earlier.decoding == AS_BEFORE
    assert earlier.predict([image(1)]) == [replace(expected, unknown_score=None)]
    file.write_text(json.dumps(described | {"decoding": {"version": 4, "sample_bits": None}}))
    with pytest.raises(InvalidPackage, match=r"\(decoding.version is 4: Input should be 1, 2 or 3\)"):
        ImageClassifier.load(tmp_path, CPU)


def test_model_with_frozen_backbone_is_loaded(tmp_path: Path) -> None:
    """A model package does not depend on whether the backbone was frozen in training."""
    torch.manual_seed(4)
    frozen = build_classifier(MODEL, "none", len(CLASSES), freeze_backbone=True)
    expected = image_classifier(frozen, CLASSES, SIDE).predict([image(1)])

    save_classifier(tmp_path, MODEL, frozen.state_dict(), CLASSES, SIDE)

    assert ImageClassifier.load(tmp_path, CPU).predict([image(1)]) == expected
