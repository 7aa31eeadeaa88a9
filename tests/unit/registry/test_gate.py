"""Tests of the promotion gate."""

import unicodedata
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.metrics import accuracy_score, f1_score, recall_score

from tasks.config.promotion import PromoteConfig
from tasks.errors import WrongInput
from tasks.refs import RunRef, TableRef
from tasks.registry.comparison import PredictedPair, chance_gain, compare, loss_p_value, mcnemar_p_value
from tasks.registry.decision import Comparison
from tasks.registry.gate import (
    check_comparable,
    check_minimums,
    check_size,
    choose_best,
    class_objections,
    classes_not_judged,
    is_better,
    is_older,
    objections,
)
from tasks.tracking.evaluated import EvaluatedRun


def run_on(
    table_id: str = "one", version: int = 3, content: str = "content", path: str = "/tables/images"
) -> EvaluatedRun:
    """Build a run that was tested on a version of a table."""
    table = TableRef(path=path, version=version, table_id=table_id)
    return EvaluatedRun(RunRef(run_id="a"), 0.5, 10, table, content, None)


def candidate(name: str, val: float | None, accuracy: float = 0.5) -> EvaluatedRun:
    """Build a candidate with these accuracies."""
    return replace(run_on(), run=RunRef(run_id=name), accuracy=accuracy, val_accuracy=val)


def test_highest_val_accuracy_is_chosen() -> None:
    """The split test takes no part in the choice, nor does the position."""
    runs = [candidate("a", 0.7, accuracy=0.9), candidate("b", 0.9, accuracy=0.6), candidate("c", 0.8, accuracy=0.8)]
    assert choose_best(runs).run.run_id == "b"


def test_first_among_equals_is_chosen() -> None:
    """Of runs with equal accuracy the first is chosen, so that the same inputs promote the same run again."""
    assert choose_best([candidate("a", 0.9), candidate("b", 0.9)]).run.run_id == "a"


def test_run_without_val_accuracy_is_refused_among_others() -> None:
    """A single run needs no choice."""
    assert choose_best([candidate("a", None)]).run.run_id == "a"
    with pytest.raises(WrongInput, match="MLflow run 'b' has no metric best_val_accuracy"):
        choose_best([candidate("a", 0.9), candidate("b", None)])


def test_run_at_the_minimums_passes() -> None:
    """Values that equal the minimums pass; without a minimum, a value may be unknown."""
    best = replace(candidate("a", 0.1, accuracy=0.8), macro_f1=0.7)
    check_minimums(best, 1, PromoteConfig(min_test_accuracy=0.8, min_test_macro_f1=0.7))
    check_minimums(replace(best, macro_f1=None), 1, PromoteConfig(min_test_accuracy=0.8))


@pytest.mark.parametrize(
    ("macro_f1", "sentence"),
    [
        (
            0.9,
            r"best of 2 runs has test accuracy 0\.7900, below promote\.min_test_accuracy 0\.8: .* the champion",
        ),
        (0.59, r"best of 2 runs has test macro F1 0\.5900, below promote\.min_test_macro_f1 0\.6"),
        (None, r"best of 2 runs has test macro F1 unknown, below"),
    ],
)
def test_nothing_below_a_minimum_is_promoted(macro_f1: float | None, sentence: str) -> None:
    """The error names the value and the minimum."""
    best = replace(candidate("a", 0.9, accuracy=0.79), macro_f1=macro_f1)
    accuracy = 0.8 if macro_f1 == 0.9 else 0.0
    with pytest.raises(WrongInput, match=sentence):
        check_minimums(best, 2, PromoteConfig(min_test_accuracy=accuracy, min_test_macro_f1=0.6))


def test_only_a_better_run_replaces_the_champion() -> None:
    """A challenger with an equal accuracy is not better: moving the alias would repeat all predictions."""
    assert is_better(0.9, 0.8)
    assert not is_better(0.8, 0.8)
    assert not is_better(0.36, 0.9)
    assert is_better(8 / 100_000, 7 / 100_000)
    assert not is_better(0.9, 0.8, min_gain=0.1)


def test_float32_rounding_does_not_make_a_run_better() -> None:
    """An accuracy recorded as float32 equals the same accuracy measured again in double precision."""
    recorded = float(torch.tensor(2) / torch.tensor(6))
    assert recorded > 2 / 6
    assert not is_better(recorded, 2 / 6)


def test_models_of_the_same_table_or_content_are_comparable() -> None:
    """Tables are the same by id, else by path if an older run has no id; equal content is comparable as well."""
    check_comparable(run_on(path="/moved"), run_on(version=4, content="more"), "photos", is_given=True)
    check_comparable(run_on(table_id=""), run_on(content="more"), "photos", is_given=True)
    check_comparable(run_on(table_id="two"), run_on(), "photos", is_given=True)
    for other in (run_on(table_id="two", content="more"), run_on(table_id="", path="/other", content="")):
        with pytest.raises(WrongInput, match="'photos' was trained on another table") as refused:
            check_comparable(other, run_on(), "photos", is_given=True)
        assert refused.value.setting == "promote.model_name"


def test_error_for_another_table_suggests_only_applicable_remedies() -> None:
    """A derived name cannot be left empty once more; a version may be the champion of several tables."""
    other = run_on(table_id="two", content="more")
    with pytest.raises(WrongInput, match="or leave it empty") as refused:
        check_comparable(other, run_on(), "photos", is_given=True)
    assert refused.value.setting == "promote.model_name"
    with pytest.raises(WrongInput, match="set promote.model_name to another name, such as 'photos-2'$"):
        check_comparable(other, run_on(), "photos", is_given=False)
    served = replace(run_on(), serves=(TableRef(path="/two", version=1, table_id="two"),))
    check_comparable(other, served, "photos", is_given=True)


def test_run_on_an_older_table_version_is_older() -> None:
    """A version with the same content, as compaction creates, is not older, nor is a version of another table."""
    assert is_older(run_on(version=2, content="less"), run_on())
    assert not is_older(run_on(version=4, content="more"), run_on())
    assert not is_older(run_on(version=2), run_on())
    assert not is_older(run_on(table_id="two", version=2, content="less"), run_on())


PAIRS = (
    PredictedPair("cat", "cat", "cat", 60),
    PredictedPair("cat", "cat", "dog", 12),
    PredictedPair("cat", "bird", "cat", 8),
    PredictedPair("dog", "dog", "dog", 15),
    PredictedPair("dog", None, "dog", 5),
)
"""100 images: the challenger is right on 87, the champion on 88, and the challenger has a third class."""


def test_figures_equal_those_of_scikit_learn_and_of_the_binomial_distribution() -> None:
    """Accuracy, macro F1 and recall over the classes that have images, and McNemar's exact test."""
    found = compare(PAIRS, left_out=3)
    labels = [pair.label for pair in PAIRS for _ in range(pair.count)]
    for ours, accuracy, macro_f1, recalls in (
        (
            [pair.challenger or "" for pair in PAIRS for _ in range(pair.count)],
            found.challenger_accuracy,
            found.challenger_macro_f1,
            [one.challenger for one in found.classes],
        ),
        (
            [pair.champion or "" for pair in PAIRS for _ in range(pair.count)],
            found.champion_accuracy,
            found.champion_macro_f1,
            [one.champion for one in found.classes],
        ),
    ):
        known = {"labels": ["cat", "dog"], "zero_division": 0}
        assert accuracy == pytest.approx(accuracy_score(labels, ours))
        assert macro_f1 == pytest.approx(f1_score(labels, ours, average="macro", **known))
        assert recalls == pytest.approx(recall_score(labels, ours, average=None, **known))
    assert (found.images, found.left_out, found.only_challenger, found.only_champion) == (100, 3, 12, 13)
    assert [(one.label, one.images) for one in found.classes] == [("cat", 80), ("dog", 20)]
    # P(X <= 2) + P(X >= 8) for ten throws of a coin.
    assert mcnemar_p_value(2, 8) == mcnemar_p_value(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert mcnemar_p_value(0, 0) == 1.0
    assert found.p_value == mcnemar_p_value(12, 13)
    with pytest.raises(ValueError, match="no images are left"):
        compare([])


def figures(**values: object) -> Comparison:
    """Return figures of a better challenger, with these changes."""
    better = {"challenger_accuracy": 0.9, "champion_accuracy": 0.8, "p_value": 0.04}
    return compare(PAIRS).model_copy(update=better | values)


@pytest.mark.parametrize(
    ("values", "limits", "parts"),
    [
        ({}, {"max_recall_drop": 0.25}, []),
        ({}, {}, ["the recall of 'dog' from 1.0000 to 0.7500 falls by more than promote.max_recall_drop 0.1"]),
        (
            {"challenger_accuracy": 0.8},
            {"max_recall_drop": 0.25},
            ["it is not better"],
        ),
        (
            {"challenger_accuracy": 0.81},
            {"max_recall_drop": 0.25, "min_accuracy_gain": 0.01},
            ["it is not better by more than promote.min_accuracy_gain 0.01"],
        ),
        ({"challenger_accuracy": 0.795}, {"max_recall_drop": 0.25, "min_accuracy_gain": -0.01}, []),
        (
            {"p_value": 0.0625},
            {"max_recall_drop": 0.25, "max_p_value": 0.05},
            ["the p-value 0.0625 of McNemar's exact test is above promote.max_p_value 0.05"],
        ),
        (
            {"num_judged": 2, "challenger_accuracy": 0.99},
            {"max_recall_drop": 0.25, "max_p_value": 0.05},
            ["the p-value 0.04 of McNemar's exact test times 2 challengers is above promote.max_p_value 0.05"],
        ),
        (
            # The two differ on 25 of 100 images: sqrt(2 * 25 * ln 3) / 100 = 0.0741.
            {"num_judged": 3, "challenger_accuracy": 0.874},
            {"max_recall_drop": 0.25},
            ["its gain of 0.0740 is not above 0.0741, which may be chance after 3 challengers"],
        ),
        ({"num_judged": 3, "challenger_accuracy": 0.875}, {"max_recall_drop": 0.25}, []),
        (
            {"num_judged": 3, "challenger_accuracy": 0.85},
            {"max_recall_drop": 0.25, "min_accuracy_gain": -0.01},
            [
                "its gain of 0.0500 is not above promote.min_accuracy_gain -0.01 plus 0.0741, which may be chance "
                "after 3 challengers"
            ],
        ),
        ({"num_judged": 3, "challenger_accuracy": 0.1}, {"max_recall_drop": 0.25, "min_accuracy_gain": -1.0}, []),
        ({}, {"max_recall_drop": 0.25, "max_p_value": 0.05}, []),
        (
            {"challenger_milliseconds": 30.0, "champion_milliseconds": 10.0},
            {"max_recall_drop": 0.25, "max_latency_ratio": 2.0},
            ["an image takes 30.0 ms, 3.00 times the champion's 10.0 ms and more than promote.max_latency_ratio 2.0"],
        ),
        ({"challenger_milliseconds": 30.0, "champion_milliseconds": 10.0}, {"max_recall_drop": 0.25}, []),
        ({}, {"max_recall_drop": 0.25, "max_latency_ratio": 2.0}, []),
    ],
)
def test_each_limit_is_an_objection_of_its_own(values: dict, limits: dict, parts: list[str]) -> None:
    """It names the figure and the setting; a challenger within all limits has none."""
    assert objections(figures(**values), PromoteConfig(**limits)) == parts


def test_weights_above_the_maximum_are_refused() -> None:
    """Without a maximum, any size is accepted."""
    check_size(10**12, PromoteConfig())
    check_size(14_000_000, PromoteConfig(max_megabytes=14))
    with pytest.raises(WrongInput, match=r"14\.0 MB, more than promote\.max_megabytes 13\.5") as refused:
        check_size(14_000_000, PromoteConfig(max_megabytes=13.5))
    assert refused.value.setting == "promote.max_megabytes"


@pytest.mark.parametrize(
    ("lost", "gained", "kept", "is_fallen", "not_judged"),
    [
        (18, 0, 0, True, []),  # from 1.0 to 0.0
        (9, 0, 9, True, []),
        (5, 0, 13, True, []),  # 1/32
        (4, 0, 14, False, ["'cat' (18)"]),  # 1/16: a larger drop than the limit, which may be chance
        (9, 6, 3, False, ["'cat' (18)"]),
        (1, 0, 17, False, []),
        (4, 0, 0, False, ["'cat' (4)"]),
        (0, 0, 4, False, ["'cat' (4)"]),
        (5, 0, 0, True, []),
        (0, 0, 5, False, []),
        (3, 0, 17, True, []),  # 20 images: the drop counts as it is
    ],
)
def test_class_with_few_images_is_judged_by_those_that_differ(
    lost: int, gained: int, kept: int, *, is_fallen: bool, not_judged: list[str]
) -> None:
    """An exact test decides whether its loss may be chance; a class that it cannot judge is named."""
    pairs = [
        PredictedPair("cat", "dog", "cat", lost),
        PredictedPair("cat", "cat", "dog", gained),
        PredictedPair("cat", "cat", "cat", kept),
        PredictedPair("dog", "dog", None, 70),
    ]
    found = compare(pairs)
    against = objections(found, PromoteConfig())
    assert any("the recall of 'cat' from" in one for one in against) == is_fallen
    assert classes_not_judged(found, PromoteConfig()) == not_judged
    assert objections(found, PromoteConfig(max_recall_drop=1.0)) == []
    assert classes_not_judged(found, PromoteConfig(max_recall_drop=1.0)) == []


def test_class_without_test_images_is_not_judged() -> None:
    """It is named first; with a minimum of one image, the drop of every other class counts as it is."""
    found = compare([PredictedPair("cat", "dog", "cat", 2), PredictedPair("dog", "dog", None, 70)])
    unseen = found.model_copy(update={"unseen": ("fox",)})
    assert classes_not_judged(unseen, PromoteConfig()) == ["'fox' (0)", "'cat' (2)"]
    assert classes_not_judged(unseen, PromoteConfig(min_class_images=1)) == ["'fox' (0)"]
    assert len(objections(found, PromoteConfig(min_class_images=1))) == 1


def test_bounds_of_chance_hold_in_a_simulation() -> None:
    """The exact test equals the binomial distribution; an equal challenger exceeds the gain in at most 1 of k tries."""
    # P(X >= 8) for ten throws of a coin.
    assert loss_p_value(8, 2) == pytest.approx((1 + 10 + 45) / 1024)
    assert loss_p_value(0, 0) == 1.0
    assert chance_gain(25, 100, 1) == 0.0
    wins = np.random.default_rng(1).binomial(25, 0.5, 100_000)
    gains = (2 * wins - 25) / 100
    for number in (2, 5, 20, 100):
        assert 0 < (gains > chance_gain(25, 100, number)).mean() <= 1 / number


def test_class_of_the_champion_that_is_gone_is_an_objection() -> None:
    """A new class is none, nor is another spelling of the same name in Unicode."""
    cafe = "Caf\u00e9"
    decomposed = unicodedata.normalize("NFD", cafe)
    assert class_objections(("cat", decomposed, "new"), (cafe, "cat"), PromoteConfig()) == []
    (found,) = class_objections(("cat", "vixen"), ("fox", "cat", cafe), PromoteConfig())
    assert found.startswith(f"it has no classes '{cafe}', 'fox', which the champion has (set promote.allow_fewer_clas")
    assert class_objections(("cat",), ("cat", "fox"), PromoteConfig(allow_fewer_classes=True)) == []
    many = class_objections(("cat",), [f"c{number}" for number in range(9)], PromoteConfig())
    assert "'c4' and 4 more" in many[0]


def test_p_value_with_a_run_that_may_be_worse_is_refused() -> None:
    """The test would let a run that is significantly worse pass, and refuse an equal one."""
    sentence = (
        r"min_accuracy_gain is -0\.01 and max_p_value is 0\.05, .* to accept a run that is worse by less than 0\.01, "
        r"leave max_p_value at 1; to promote only a run that is significantly better, set min_accuracy_gain to 0"
    )
    with pytest.raises(ValidationError, match=sentence):
        PromoteConfig(min_accuracy_gain=-0.01, max_p_value=0.05)
    PromoteConfig(min_accuracy_gain=-0.01)
    PromoteConfig(max_p_value=0.05)
