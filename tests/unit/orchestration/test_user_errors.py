"""Tests of the transfer of user errors from a submitted run to its parent run."""

import pytest

from tasks.errors import (
    DiskFull,
    Diverged,
    RankStalled,
    RunDeleted,
    TimeLimitExceeded,
    TrackingUnavailable,
    WrongInput,
    parse_user_error,
)
from tasks.orchestration.failure import state_message


@pytest.mark.parametrize(
    "kind", [Diverged, WrongInput, TimeLimitExceeded, DiskFull, TrackingUnavailable, RunDeleted, RankStalled]
)
def test_user_error_is_restored_from_the_message_of_a_state(kind: type[Exception]) -> None:
    """It has the same type, which decides about retries, and the same sentence, whatever its content."""
    restored = parse_user_error(state_message(kind("train.lr is 1: it\nis (WrongInput), no")))

    assert type(restored) is kind
    # On one line, so that a value in the sentence cannot begin a new line of a log.
    assert str(restored) == r"train.lr is 1: it\nis (WrongInput), no"


def test_other_failures_are_not_restored_as_user_errors() -> None:
    """The name of a user error in a message is not enough."""
    assert parse_user_error("Flow run encountered an exception: RuntimeError: WrongInput") is None
    assert parse_user_error(state_message(RuntimeError("WrongInput"))) is None
    assert parse_user_error("") is None


@pytest.mark.parametrize(
    "message",
    [
        "rank 1 ended with status 1; its last lines:\nWrongInput: train.lr is 1 (WrongInput)",
        "Flow run encountered an exception: RankFailed: rank 1 ended; its last lines:\nit is 1 (WrongInput)",
        "Flow run encountered an exception: RuntimeError: WrongInput: it is 1 (WrongInput)",
        "Task run encountered an exception RuntimeError: WrongInput: it is 1 (WrongInput)",
    ],
)
def test_error_that_another_one_quotes_is_not_restored(message: str) -> None:
    """A failed rank's last lines may end as the message of a user error does, and the rank is started again."""
    assert parse_user_error(message) is None
    assert parse_user_error(f"{message} (RankFailed)") is None
