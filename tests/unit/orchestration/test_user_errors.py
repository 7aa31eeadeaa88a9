"""Tests of the transfer of user errors from a submitted run to its parent run."""

import pytest

from tasks.errors import (
    AccessDenied,
    DiskFull,
    Diverged,
    OutOfMemory,
    RankStalled,
    RunDeleted,
    SubmittedRunCancelled,
    SubmittedRunFailed,
    SubmittedRunLost,
    TimeLimitExceeded,
    TrackingUnavailable,
    UserError,
    WrongInput,
    is_retried,
)
from tasks.launch.restarts import RanksLost
from tasks.orchestration.failure import error_labels, noted_error, state_message


def restored_by_submitter(error: UserError) -> UserError | None:
    """Return the error that the submitter of a run restores, which this error ended."""
    return noted_error(error_labels(error), state_message(error))


RESTORED = [
    Diverged,
    WrongInput,
    TimeLimitExceeded,
    DiskFull,
    OutOfMemory,
    TrackingUnavailable,
    AccessDenied,
    RunDeleted,
    RankStalled,
    SubmittedRunFailed,
    SubmittedRunLost,
]


@pytest.mark.parametrize("kind", RESTORED)
def test_user_error_is_restored_by_the_submitter_of_its_run(kind: type[UserError]) -> None:
    """It has the same type, which decides about retries, and the same sentence, whatever its content."""
    restored = restored_by_submitter(kind("train.lr is 1", setting="train.lr", way_out="it\nis (WrongInput), no"))

    assert type(restored) is kind
    # On one line, so that a value in the sentence cannot begin a new line of a log.
    assert str(restored) == r"train.lr is 1: it\nis (WrongInput), no"
    assert (restored.setting, restored.way_out) == ("train.lr", r"it\nis (WrongInput), no")


def test_error_of_a_class_that_this_release_lacks_is_a_failed_run() -> None:
    """A worker of a newer release has ended the run; the sentence is kept, and the run is not submitted again."""
    error = WrongInput("train.lr is 1", setting="train.lr", way_out="lower it")
    labels = {name: value.replace("WrongInput", "NewKind") for name, value in error_labels(error).items()}

    restored = noted_error(labels, state_message(error))

    assert type(restored) is SubmittedRunFailed
    assert (str(restored), restored.way_out) == ("train.lr is 1: lower it", "lower it")


def test_other_failures_are_not_restored_as_user_errors() -> None:
    """The name of a user error in a message is not enough."""
    assert noted_error({}, "Flow run encountered an exception: RuntimeError: WrongInput") is None
    assert noted_error({}, state_message(RuntimeError("WrongInput"))) is None
    assert noted_error({}, "") is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WrongInput("a"), False),
        (TimeLimitExceeded("a"), False),
        (SubmittedRunFailed("a"), False),  # its own stages were retried
        (SubmittedRunCancelled("a"), False),
        (SubmittedRunLost("a"), True),  # it had no chance to retry
        (DiskFull("a"), True),
        (OutOfMemory("a"), False),  # of a rank: the same settings need as much again
        (RanksLost("a"), True),
        (MemoryError("a"), True),
    ],
)
def test_one_function_decides_which_errors_are_retried(error: Exception, expected: bool) -> None:
    """A time limit and a failed submitted run are not, an error that may be transient is."""
    assert is_retried(error) == expected


def test_error_that_a_submitted_run_has_retried_is_not_retried_again() -> None:
    """Otherwise a full disk would be met nine times: three times in each of three submitted runs."""
    restored = restored_by_submitter(DiskFull("the disk is full"))
    assert restored is not None
    restored.was_retried = True
    assert not is_retried(restored)


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
    assert noted_error({}, message) is None
    assert noted_error({}, f"{message} (RankFailed)") is None
    # An earlier start of the same run has left its label.
    assert noted_error(error_labels(WrongInput("it is 1")), message) is None
