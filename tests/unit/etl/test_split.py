"""The split of an image: a function of its content and the seed."""

import hashlib
from collections import Counter

import pytest

from tasks.etl.extract import split_of
from tasks.refs import SPLITS, TEST, TRAIN, VAL

HASHES = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(4000)]
"""SHA-256 of 4,000 contents."""


def test_split_is_a_function_of_content_and_seed() -> None:
    """The split of an image does not depend on the order of calls or on other images."""
    together = {sha256: split_of(sha256, 1, 0.1, 0.1) for sha256 in HASHES}

    assert all(split_of(sha256, 1, 0.1, 0.1) == together[sha256] for sha256 in reversed(HASHES))


def test_split_fractions_are_kept() -> None:
    """4,000 images have the requested fractions within 0.025."""
    counts = Counter(split_of(sha256, 1, 0.2, 0.1) for sha256 in HASHES)

    assert set(counts) == set(SPLITS)
    assert counts[VAL] / len(HASHES) == pytest.approx(0.2, abs=0.025)
    assert counts[TEST] / len(HASHES) == pytest.approx(0.1, abs=0.025)


def test_another_seed_is_another_split() -> None:
    """With another seed, the expected fraction of images changes its split, within 0.04."""
    moved = sum(split_of(sha256, 1, 0.25, 0.25) != split_of(sha256, 2, 0.25, 0.25) for sha256 in HASHES)

    assert moved / len(HASHES) == pytest.approx(1 - (0.5**2 + 2 * 0.25**2), abs=0.04)


def test_fraction_of_zero_gives_an_empty_split() -> None:
    """With both fractions 0, all images are in the split `train`."""
    assert {split_of(sha256, 1, 0.0, 0.0) for sha256 in HASHES} == {TRAIN}
