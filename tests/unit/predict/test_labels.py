"""Labels of a table and classes of a model that were written in other forms of Unicode."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tasks.cache.manifest import open_cache, write_manifest
from tasks.model_package.description import AS_BEFORE
from tasks.predict.evaluation import accuracy_on_cache
from tasks.predict.scoring import unlearned_labels
from tasks.refs import CacheRef
from tasks.text.forms import as_known

NFC, NFD = "Caf\u00e9", "Cafe\u0301"


def test_label_in_another_form_is_a_class_of_the_model() -> None:
    """Only a label that differs in more than its form was not learned."""
    assert unlearned_labels([NFC, "bar"], (NFD, "bar")) == set()
    assert unlearned_labels([NFD, "bar"], (NFC, "Bar")) == {"bar"}


def test_exact_form_counts_first_and_the_composed_one_next() -> None:
    """An older model may have both forms as classes of their own."""
    both = as_known({NFC, NFD})
    assert [both(NFC), both(NFD)] == [NFC, NFD]
    assert [as_known({NFD})(NFC), as_known({NFC})(NFD), as_known(set())(NFD)] == [NFD, NFC, NFC]


@pytest.mark.parametrize("name", [NFD, NFC, "other"])
def test_accuracy_compares_classes_in_any_form(make_cache: Callable[..., CacheRef], name: str) -> None:
    """A classifier that always answers one class is right on its images, whatever the form of the name."""
    cache = make_cache({"train": 3, "val": 3, "test": 9})
    cache = write_manifest(cache.url, open_cache(cache).model_copy(update={"classes": (NFC, "b", "c")}))
    classifier = SimpleNamespace(
        image_size=16,
        decoding=AS_BEFORE,
        classes=(name, "b", "c"),
        logits=lambda inputs: torch.eye(3)[torch.zeros(len(inputs), dtype=int)],
    )

    accuracy = accuracy_on_cache(cast("Any", classifier), cache)

    assert accuracy == pytest.approx(0.0 if name == "other" else 1 / 3)
