"""Tests of the promotion gate."""

from dataclasses import replace

import pytest
import torch

from tasks.errors import WrongInput
from tasks.refs import RunRef, TableRef
from tasks.registry.gate import check_comparable, choose_best, is_better, is_older
from tasks.tracking import EvaluatedRun


def run_on(
    table_id: str = "one", version: int = 3, content: str = "content", path: str = "/tables/images"
) -> EvaluatedRun:
    """Build a run that was tested on a version of a table."""
    table = TableRef(path=path, version=version, table_id=table_id)
    return EvaluatedRun(RunRef(run_id="a"), 0.5, 10, table, content, None)


def test_highest_test_accuracy_is_chosen() -> None:
    """The run with the highest accuracy is chosen, whatever its position."""
    assert choose_best({"a": 0.7, "b": 0.9, "c": 0.8}, min_test_accuracy=0.0) == "b"


def test_first_among_equals_is_chosen() -> None:
    """Of runs with equal accuracy the first is chosen, so that the same inputs promote the same run again."""
    assert choose_best({"a": 0.9, "b": 0.9}, min_test_accuracy=0.0) == "a"


def test_run_at_the_gate_passes() -> None:
    """A run whose accuracy equals the minimum passes."""
    assert choose_best({"a": 0.8}, min_test_accuracy=0.8) == "a"


def test_nothing_below_the_gate_is_promoted() -> None:
    """The error names the best accuracy and the minimum, and states that the champion is unchanged."""
    with pytest.raises(
        WrongInput, match=r"best of 2 runs has test accuracy 0\.7900, below .* 0\.8: .*the champion is unchanged"
    ):
        choose_best({"a": 0.79, "b": 0.5}, min_test_accuracy=0.8)


def test_only_a_better_run_replaces_the_champion() -> None:
    """A challenger with an equal accuracy is not better: moving the alias would repeat all predictions."""
    assert is_better(0.9, 0.8)
    assert not is_better(0.8, 0.8)
    assert not is_better(0.36, 0.9)
    assert is_better(8 / 100_000, 7 / 100_000)


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
        with pytest.raises(WrongInput, match=r"champion of the registered model 'photos' was trained on another table"):
            check_comparable(other, run_on(), "photos", is_given=True)


def test_error_for_another_table_suggests_only_applicable_remedies() -> None:
    """A derived name cannot be left empty once more; a version may be the champion of several tables."""
    other = run_on(table_id="two", content="more")
    with pytest.raises(WrongInput, match="to another name, or leave it empty for a name derived from the table"):
        check_comparable(other, run_on(), "photos", is_given=True)
    with pytest.raises(WrongInput, match="set promote.model_name to another name$"):
        check_comparable(other, run_on(), "photos", is_given=False)
    served = replace(run_on(), serves=(TableRef(path="/two", version=1, table_id="two"),))
    check_comparable(other, served, "photos", is_given=True)


def test_run_on_an_older_table_version_is_older() -> None:
    """A version with the same content, as compaction creates, is not older, nor is a version of another table."""
    assert is_older(run_on(version=2, content="less"), run_on())
    assert not is_older(run_on(version=4, content="more"), run_on())
    assert not is_older(run_on(version=2), run_on())
    assert not is_older(run_on(table_id="two", version=2, content="less"), run_on())
