"""Early stopping on lists of metric values."""

import math

import pytest

from tasks.train.progress import EarlyStopping


def epochs_until_stop(stopping: EarlyStopping, values: list[float]) -> int:
    """Update with one value after another; return the number of epochs until the stop."""
    for epoch, value in enumerate(values):
        stopping.update(epoch, value)
        if stopping.should_stop:
            return epoch + 1
    return len(values)


def test_training_continues_while_accuracy_rises() -> None:
    """No patience is used while each epoch improves on the last."""
    stopping = EarlyStopping(patience=1, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.1, 0.2, 0.3, 0.4]) == 4
    assert not stopping.should_stop
    assert (stopping.best, stopping.best_epoch) == (0.4, 3)


@pytest.mark.parametrize(("patience", "trained"), [(1, 3), (2, 4), (3, 5)])
def test_training_stops_after_patience_epochs_without_improvement(patience: int, trained: int) -> None:
    """Training stops `patience` epochs after the best epoch, which is epoch 1."""
    stopping = EarlyStopping(patience, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.1, 0.5, 0.4, 0.3, 0.2, 0.1]) == trained
    assert (stopping.best, stopping.best_epoch) == (0.5, 1)


def test_improvement_resets_patience() -> None:
    """Only consecutive epochs without improvement count."""
    stopping = EarlyStopping(patience=2, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.5, 0.4, 0.6, 0.5, 0.7, 0.6]) == 6
    assert not stopping.should_stop


def test_lower_loss_is_better() -> None:
    """For a loss, a lower value is an improvement."""
    stopping = EarlyStopping(patience=2, min_delta=0.0, higher_is_better=False)

    assert epochs_until_stop(stopping, [2.0, 1.0, 1.5, 1.2, 0.1]) == 4
    assert (stopping.best, stopping.best_epoch) == (1.0, 1)


def test_equal_value_is_not_an_improvement() -> None:
    """A constant metric uses up patience, and its first epoch stays the best."""
    stopping = EarlyStopping(patience=2, min_delta=0.0, higher_is_better=True)

    assert epochs_until_stop(stopping, [0.5, 0.5, 0.5, 0.5]) == 3
    assert stopping.best_epoch == 0


def test_change_up_to_min_delta_is_not_an_improvement() -> None:
    """Only a change larger than min_delta counts as improvement."""
    stopping = EarlyStopping(patience=9, min_delta=0.25, higher_is_better=True)

    assert [stopping.update(epoch, value) for epoch, value in enumerate([0.0, 0.25, 0.5, 0.75])] == [
        True,
        False,
        True,
        False,
    ]


def test_update_returns_whether_the_epoch_is_the_best() -> None:
    """`update` returns True only for a new best value."""
    stopping = EarlyStopping(patience=9, min_delta=0.0, higher_is_better=False)

    assert [stopping.update(epoch, value) for epoch, value in enumerate([1.0, 2.0, 0.5])] == [True, False, True]


def test_training_does_not_stop_before_the_first_epoch() -> None:
    """A new counter does not stop training."""
    assert not EarlyStopping(patience=1, min_delta=0.0, higher_is_better=True).should_stop


def test_nan_metric_is_never_the_best() -> None:
    """After NaN in the first epoch, a later epoch can be the best."""
    stopping = EarlyStopping(patience=3, min_delta=0.0, higher_is_better=False)

    assert not stopping.update(0, math.nan) or stopping.update(1, 1.0)
