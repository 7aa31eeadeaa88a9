"""Which run is promoted."""

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
    """Return a run that was tested on a version of a table."""
    table = TableRef(path=path, version=version, table_id=table_id)
    return EvaluatedRun(RunRef(run_id="a"), 0.5, 10, table, content, None)


def test_highest_test_accuracy_is_chosen() -> None:
    """Of several runs the best is chosen, wherever it stands."""
    assert choose_best({"a": 0.7, "b": 0.9, "c": 0.8}, min_test_accuracy=0.0) == "b"


def test_first_among_equals_is_chosen() -> None:
    """The same inputs promote the same run again."""
    assert choose_best({"a": 0.9, "b": 0.9}, min_test_accuracy=0.0) == "a"


def test_run_at_the_gate_passes() -> None:
    """The gate is the least accuracy that is allowed."""
    assert choose_best({"a": 0.8}, min_test_accuracy=0.8) == "a"


def test_nothing_below_the_gate_is_promoted() -> None:
    """The sentence says how good the best is, what the gate is, and that the champion stays."""
    with pytest.raises(WrongInput, match=r"best of 2 runs has test accuracy 0\.7900, below .* 0\.8: .*as it was"):
        choose_best({"a": 0.79, "b": 0.5}, min_test_accuracy=0.8)


def test_only_a_better_run_takes_the_title() -> None:
    """Of equals the champion stays: an alias that moves for nothing makes all predictions anew."""
    assert is_better(0.9, 0.8)
    assert not is_better(0.8, 0.8)
    assert not is_better(0.36, 0.9)
    assert is_better(8 / 100_000, 7 / 100_000)


def test_rounding_makes_no_run_better() -> None:
    """What a training recorded as float32 is equal to what is measured again in full."""
    recorded = float(torch.tensor(2) / torch.tensor(6))
    assert recorded > 2 / 6
    assert not is_better(recorded, 2 / 6)


def test_models_of_one_table_or_one_content_are_comparable() -> None:
    """By the table's id wherever it lies now; by its path where a run is older than ids; or by equal content."""
    check_comparable(run_on(path="/moved"), run_on(version=4, content="more"), "photos", is_given=True)
    check_comparable(run_on(table_id=""), run_on(content="more"), "photos", is_given=True)
    check_comparable(run_on(table_id="two"), run_on(), "photos", is_given=True)
    for other in (run_on(table_id="two", content="more"), run_on(table_id="", path="/other", content="")):
        with pytest.raises(WrongInput, match=r"champion of the registered model 'photos' was trained on another table"):
            check_comparable(other, run_on(), "photos", is_given=True)


def test_the_way_out_is_one_that_there_is() -> None:
    """A name that was derived from the table is left empty already; a version may be the champion of several tables."""
    other = run_on(table_id="two", content="more")
    with pytest.raises(WrongInput, match="to another name, or leave it empty for a name of the table's own"):
        check_comparable(other, run_on(), "photos", is_given=True)
    with pytest.raises(WrongInput, match="set promote.model_name to another name$"):
        check_comparable(other, run_on(), "photos", is_given=False)
    served = replace(run_on(), serves=(TableRef(path="/two", version=1, table_id="two"),))
    check_comparable(other, served, "photos", is_given=True)


def test_a_run_of_an_older_version_of_the_table_is_older() -> None:
    """A version with the same content, which compaction makes, is none, nor is one of another table."""
    assert is_older(run_on(version=2, content="less"), run_on())
    assert not is_older(run_on(version=4, content="more"), run_on())
    assert not is_older(run_on(version=2), run_on())
    assert not is_older(run_on(table_id="two", version=2, content="less"), run_on())
