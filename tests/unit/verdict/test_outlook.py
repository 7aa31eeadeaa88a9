"""The verdict from held-out answers: its sentence, weakest classes, and confused pairs."""

import numpy as np
import pytest

from tasks.refs import Verdict
from tasks.verdict.outlook import confused_pairs, make_verdict
from tasks.verdict.page import draw_verdict, verdict_markdown
from tasks.verdict.probe import Judged, judge

CLASSES = ("ant", "bee", "cat")


def judged_of(labels: list[int], predicted: list[list[list[int]]], sizes: list[float]) -> Judged:
    """Return the answers of each repeat and share."""
    predicted_RSN = np.array(predicted)
    return Judged(np.array(sizes), np.array(labels), predicted_RSN, predicted_RSN != np.array(labels))


def test_sentence_has_interval_worth_of_images_and_time():
    """A verdict about many images has a narrow interval, and names the time of an epoch of fine-tuning."""
    labels = [0, 1] * 400
    wrong = [1, 0] * 400
    shares = [[wrong[:part] + labels[part:] for part in (240, 160, 80)]] * 2
    verdict, _ = make_verdict(judged_of(labels, shares, [160, 320, 640]), CLASSES[:2], 700, 100, 50.0, 1)

    low, high = verdict.interval
    assert low < verdict.accuracy < high < low + 0.2
    assert verdict.line.startswith(f"expected test accuracy {low:.2f} to {high:.2f} (about {verdict.accuracy:.3f})")
    assert verdict.line.endswith("; an epoch of fine-tuning all layers takes about 14 s here")
    assert verdict.curve == ((160, 0.7), (320, 0.8), (640, 0.9))
    assert 0 < verdict.worth_of_doubling < 0.1


@pytest.mark.parametrize("counts", [[3, 3, 0], [1, 1, 1], [2, 1, 0], [5, 0, 0]], ids=str)
def test_few_images_give_a_verdict_that_says_how_little_it_knows(counts):
    """Classes with one image or without one have a verdict as well, and all its values are finite."""
    labels = np.repeat(np.arange(3), counts)
    features = np.random.default_rng(1).normal(size=(len(labels), 8)).astype(np.float32)
    judged = judge(features, labels, 1)

    verdict, curves = make_verdict(judged, CLASSES, len(labels), 1, None, 1)

    assert f"{len(labels)} images of {np.count_nonzero(counts)} classes say no more than that" in verdict.line
    assert verdict.interval[1] - verdict.interval[0] > 0.5
    assert {one.name for one in verdict.weakest} == {CLASSES[label] for label in labels}
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert "nan" not in verdict.model_dump_json().lower()
    page = verdict_markdown(verdict, draw_verdict(verdict, curves, judged, CLASSES, len(labels)))
    assert page.count("](data:image/png;base64,") == 2
    assert "nan" not in page.lower().replace("data:", "").split("base64")[0]


def test_weakest_class_and_its_worth_come_first():
    """A class with many errors, which fall with the images, is first, with as many more images as it has."""
    labels = [0] * 300 + [1] * 100
    shares = [[[0] * 300 + [0] * part + [1] * (100 - part) for part in (80, 60, 40)]] * 2

    verdict, _ = make_verdict(judged_of(labels, shares, [80, 160, 320]), CLASSES[:2], 360, 40, None, 1)

    weakest, other = verdict.weakest
    assert (weakest.name, weakest.images, other.name) == ("bee", 90, "ant")
    assert weakest.accuracy == pytest.approx(0.63, abs=0.05)
    gain, low, high = weakest.gain
    assert low < gain < high
    assert gain > 0.03 > other.gain[0]


def test_confused_pairs_are_counted_over_the_repeats():
    """A pair has the mean number of images over the repeats, with the interval of their share, most frequent first."""
    labels = [0, 0, 0, 0, 1, 1, 2]
    predicted = [[[1, 1, 2, 0, 1, 1, 2]], [[1, 0, 0, 0, 1, 0, 2]]]

    pairs = confused_pairs(judged_of(labels, predicted, [5]), CLASSES)

    assert [(pair.true, pair.predicted, pair.wrong, pair.images) for pair in pairs] == [
        ("ant", "bee", 1.5, 4),
        ("ant", "cat", 0.5, 4),
        ("bee", "ant", 0.5, 2),
    ]
    assert pairs[0].share[1] < pairs[0].share[0] == 1.5 / 4 < pairs[0].share[2]


def test_names_are_literal_in_the_page():
    """Markdown in the name of a class is escaped, and its control characters are visible."""
    labels = [0, 0, 1, 1]
    judged = judged_of(labels, [[[1, 0, 1, 1]]], [3])
    names = ("a|b\x1b", "[x](http://evil)")
    verdict, curves = make_verdict(judged, names, 4, 1, None, 1)

    page = verdict_markdown(verdict, draw_verdict(verdict, curves, judged, names, 4))

    assert "| a\\|b\\\\x1b |" in page
    assert "](http://evil)" not in page.replace("\\]", "")
