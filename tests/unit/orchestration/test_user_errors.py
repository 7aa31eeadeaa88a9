"""What a submitted run ended with is what whoever waits for it is told."""

import pytest

from tasks.errors import DiskFull, Diverged, OutOfTime, RunDeleted, TrackingAway, WrongInput, parse_user_error
from tasks.orchestration.failure import state_message


@pytest.mark.parametrize("kind", [Diverged, WrongInput, OutOfTime, DiskFull, TrackingAway, RunDeleted])
def test_an_error_for_a_person_is_the_same_on_both_sides_of_a_pool(kind: type[Exception]) -> None:
    """Of its own kind, which decides whether it is tried again, and with its sentence, whatever is in that."""
    told = parse_user_error(state_message(kind("train.lr is 1: it\nis (WrongInput), no")))

    assert type(told) is kind
    # On one line: whatever is in a value, the sentence begins no other line of a log.
    assert str(told) == r"train.lr is 1: it\nis (WrongInput), no"


def test_another_failure_is_none_of_these() -> None:
    """A name alone says nothing."""
    assert parse_user_error("Flow run encountered an exception: RuntimeError: WrongInput") is None
    assert parse_user_error(state_message(RuntimeError("WrongInput"))) is None
    assert parse_user_error("") is None
