"""Early stopping on lists of numbers."""

import math

import pytest

from tasks.train.early_stopping import EarlyStopping


def epochs_until_stop(stopping: EarlyStopping, values: list[float]) -> int:
    """Feed the values one by one; return how many epochs were trained."""
    for epoch, value in enumerate(values):
        stopping.update(epoch, value)
        if stopping.should_stop:
            return epoch + 1
    return len(values)


def test_training_goes_on_while_accuracy_rises() -> None:
    """As long as each epoch is better, patience is whole."""
    stopping = EarlyStopping(patience=1, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.1, 0.2, 0.3, 0.4]) == 4
    assert not stopping.should_stop
    assert (stopping.best, stopping.best_epoch) == (0.4, 3)


@pytest.mark.parametrize(("patience", "trained"), [(1, 3), (2, 4), (3, 5)])
def test_training_stops_after_patience_epochs_without_improvement(patience: int, trained: int) -> None:
    """The best is epoch 1; as many epochs as patience allows follow it."""
    stopping = EarlyStopping(patience, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.1, 0.5, 0.4, 0.3, 0.2, 0.1]) == trained
    assert (stopping.best, stopping.best_epoch) == (0.5, 1)


def test_improvement_gives_patience_back() -> None:
    """Epochs without improvement are counted in a row, not in sum."""
    stopping = EarlyStopping(patience=2, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.5, 0.4, 0.6, 0.5, 0.7, 0.6]) == 6
    assert not stopping.should_stop


def test_lower_loss_is_better() -> None:
    """With a loss the direction is the other one."""
    stopping = EarlyStopping(patience=2, min_delta=0.0, higher_is_better=False)

    assert epochs_until_stop(stopping, [2.0, 1.0, 1.5, 1.2, 0.1]) == 4
    assert (stopping.best, stopping.best_epoch) == (1.0, 1)


def test_same_value_is_no_improvement() -> None:
    """A metric that stands still uses patience up, and the first of equals stays the best."""
    stopping = EarlyStopping(patience=2, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.5, 0.5, 0.5, 0.5]) == 3
    assert stopping.best_epoch == 0


def test_change_up_to_min_delta_is_no_improvement() -> None:
    """Only what is more than min_delta counts."""
    stopping = EarlyStopping(patience=9, min_delta=0.25, higher_is_better=True)

    assert [stopping.update(epoch, value) for epoch, value in enumerate([0.0, 0.25, 0.5, 0.75])] == [
        True,
        False,
        True,
        False,
    ]


def test_update_says_whether_it_was_the_best() -> None:
    """The answer is what decides whether weights are kept."""
    stopping = EarlyStopping(patience=9, min_delta=0.0, higher_is_better=False)

    assert [stopping.update(epoch, value) for epoch, value in enumerate([1.0, 2.0, 0.5])] == [True, False, True]


def test_nothing_has_stopped_before_the_first_epoch() -> None:
    """A new training starts."""
    assert not EarlyStopping(patience=1, min_delta=0.0, higher_is_better=True).should_stop


def test_metric_that_is_no_number_is_never_the_best() -> None:
    """A NaN in the first epoch does not keep the later ones from being better."""
    stopping = EarlyStopping(patience=3, min_delta=0.0, higher_is_better=False)

    assert not stopping.update(0, math.nan) or stopping.update(1, 1.0)
