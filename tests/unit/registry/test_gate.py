"""Which run is promoted."""

import pytest

from tasks.errors import WrongInput
from tasks.registry.gate import choose_best


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
