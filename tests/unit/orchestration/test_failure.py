"""Why a run failed, as a user reads it."""

import logging

import pytest

from tasks.errors import DiskFull, OutOfTime, WrongInput, listed
from tasks.orchestration.failure import (
    OneSentence,
    mark_as_told,
    named_setting,
    state_message,
    way_out,
    what_went_wrong,
)


@pytest.mark.parametrize(
    ("sentence", "setting", "advice"),
    [
        (
            "distributed.num_ranks is 9 and there are 4 GPUs: give at most as many ranks",
            "distributed.num_ranks",
            "give at most as many ranks",
        ),
        ("storage.home is '/data: etl.source', which is full: make room", "storage.home", "make room"),
        ("the source '/data/cache.old' is empty", None, None),
        (
            "no worker took it within tune.submit_timeout_seconds 25: start one",
            "tune.submit_timeout_seconds",
            "start one",
        ),
        ("'x' of tasks/etl/read.py is not there", None, None),
    ],
)
def test_setting_and_way_out_are_read_off_the_sentence(sentence: str, setting: str | None, advice: str | None) -> None:
    """Quoted values are neither."""
    assert named_setting(sentence) == setting
    assert way_out(sentence) == advice


def test_message_and_artifact_lead_with_the_sentence_and_hold_no_secret() -> None:
    """The kind of the error comes last in the message, for the run that waits for this one."""
    error = WrongInput("storage.tracking is 'http://me:hidden@host', which does not answer: start it")
    assert state_message(error) == (
        "storage.tracking is 'http://***@host', which does not answer: start it (WrongInput)"
    )
    text = what_went_wrong(error, "http://ui/run", ["Submitted training: [a](http://ui/child)"])
    assert text.splitlines() == [
        "# What went wrong",
        "",
        "**storage.tracking is 'http://\\*\\*\\*@host', which does not answer: start it**",
        "",
        "- Setting: `storage.tracking`",
        "- Way out: start it",
        "- Submitted training: [a](http://ui/child)",
        "- Full log: [logs of this run](http://ui/run)",
    ]


def test_a_sentence_is_shown_and_does_nothing_else() -> None:
    """File names and values of users are in it."""
    text = what_went_wrong(WrongInput("'<img src=x>\n# [click](http://evil)' is no picture"), None)
    assert "<img" not in text.replace("\\<", "")
    assert "](http://evil)" not in text.replace("\\]", "")
    assert "\n# [" not in text


def test_an_unexpected_error_is_named_with_its_place_in_this_code() -> None:
    """The innermost frame of the project's own, and not of a library or a test."""
    with pytest.raises(TypeError) as raised:
        listed(["a"], None)  # type: ignore[arg-type]
    text = what_went_wrong(raised.value, None)
    assert "**TypeError: " in text
    assert "`tasks/errors.py, line " in text
    assert ", in listed`" in text
    assert "the log below has its traceback" in text


def logged(error: Exception, message: str) -> tuple[bool, logging.LogRecord]:
    """Return whether the filter lets a record of an error pass, and the record."""
    about = (type(error), error, None)
    record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, message, (), about)
    return OneSentence().filter(record), record


@pytest.mark.parametrize("error", [WrongInput("a"), OutOfTime("a"), DiskFull("a")])
def test_errors_that_a_sentence_explains_are_logged_without_a_traceback(error: Exception) -> None:
    """Their sentence takes the place of the engine's words, and is said once."""
    passes, record = logged(error, "Task run failed with exception")
    assert passes
    assert record.exc_info is None
    passes, record = logged(error, "Engine execution exited with unexpected exception")
    assert passes
    assert (record.getMessage(), record.exc_info) == ("a", None)
    mark_as_told(error)
    assert not logged(error, "Engine execution exited with unexpected exception")[0]


def test_unexpected_errors_keep_their_traceback() -> None:
    """It says where to look."""
    for message in ("Encountered exception during execution", "Engine execution exited with unexpected exception"):
        passes, record = logged(ConnectionError("a"), message)
        assert passes
        assert record.exc_info is not None


def test_what_the_engine_logs_shows_no_credentials_and_a_cancelled_task_is_no_error() -> None:
    """Also where an error is shown as Python writes it."""
    _passes, record = logged(ConnectionError("a"), "failed with ConnectionError('s3://me:hidden@host')")
    assert record.getMessage() == "failed with ConnectionError('s3://***@host')"
    line = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, "Finished in state Cancelled('a')", (), None)
    assert OneSentence().filter(line)
    assert line.levelno == logging.INFO
