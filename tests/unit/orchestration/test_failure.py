"""Why a run failed, as a user reads it."""

import logging
import traceback

import pytest

from tasks.errors import DiskFull, OutOfTime, WrongInput, listed
from tasks.orchestration.failure import (
    OneSentence,
    named_setting,
    state_message,
    way_out,
    what_went_wrong,
    without_secrets,
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
        ("source is 'a', which is neither a path nor a URL: give a folder", "source", "give a folder"),
        ("table_version is 9, but '/t' has the versions 0 to 3: give one", "table_version", "give one"),
        ("run_ids has 'a' and 'b', which were trained on different tables", "run_ids", None),
        ("run_id is 'a', whose config.json has no data: give another", "run_id", "give another"),
        ("config.train: freeze_backbone is true with weights 'none': set it", "train.freeze_backbone", "set it"),
        ("study is 'a' and number is not given: give both", "study", "give both"),
        ("config.number is -1: input should be 0 or more", "number", "input should be 0 or more"),
        ("config.train.fine_tune.0.epochs is 0: give 1", "train.fine_tune.0.epochs", "give 1"),
        ("spark.conf.spark.executor.cores: it is no number", "spark.conf.spark.executor.cores", "it is no number"),
        ("the file config.json was written by torch.save in mlflow.db", None, None),
        ("the source is empty, and so is the number of images", None, None),
    ],
)
def test_setting_and_way_out_are_read_off_the_sentence(sentence: str, setting: str | None, advice: str | None) -> None:
    """Quoted values are neither."""
    assert named_setting(sentence) == setting
    assert way_out(sentence) == advice


def test_each_of_several_errors_has_its_own_line() -> None:
    """The setting of one beside the advice of another would mislead."""
    sentence = "config.etl.max_bad_fraction is 7: give at most 1; config.train.seed is '0; a': give 1 or more"
    lines = what_went_wrong(WrongInput(sentence), None).splitlines()
    assert [line for line in lines if line.startswith("- ") and "log" not in line] == [
        "- Setting: `etl.max_bad_fraction`. Way out: give at most 1",
        "- Setting: `train.seed`. Way out: give 1 or more",
    ]


def test_advice_with_a_semicolon_is_one_error() -> None:
    """Only what names a setting of its own is another error."""
    sentence = "storage.home is 'a', which is not local: logs lie there; set storage.tables instead"
    assert "- Setting: `storage.home`\n- Way out: logs lie there; set storage.tables instead" in what_went_wrong(
        WrongInput(sentence), None
    )


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
    text = what_went_wrong(WrongInput("'<img src=x>\n# [click](http://evil)' is no image"), None)
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
    """Their sentence is said once, by the flow itself, and not again by the engine."""
    passes, record = logged(error, "Task run failed with exception")
    assert passes
    assert record.exc_info is None
    assert not logged(error, "Engine execution exited with unexpected exception")[0]


def test_unexpected_errors_keep_their_traceback() -> None:
    """It says where to look."""
    for message in ("Encountered exception during execution", "Engine execution exited with unexpected exception"):
        passes, record = logged(ConnectionError("a"), message)
        assert passes
        assert record.exc_info is not None


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Return an error as it is when it was raised and caught."""
    try:
        raise error from cause  # noqa: TRY301  # to be caught
    except Exception as caught:
        return caught


@pytest.mark.parametrize("hidden_in_cause", [False, True])
def test_an_unexpected_error_is_handed_on_without_the_password_in_its_text(hidden_in_cause: bool) -> None:
    """Prefect logs its text, its traceback and those of its causes; the kind and the place stay."""
    secret = OSError("API request to http://me:hidden@127.0.0.1:9/api failed")
    error = raised(ValueError("it failed"), secret) if hidden_in_cause else raised(secret)
    clean = without_secrets(error)
    shown = "".join(traceback.format_exception(clean))
    assert "hidden" not in shown
    assert str(clean) == (
        "ValueError: it failed" if hidden_in_cause else "OSError: API request to http://***@127.0.0.1:9/api failed"
    )
    assert "in raised" in shown
    assert type(clean) is RuntimeError


def test_other_errors_are_handed_on_as_they_are() -> None:
    """Also where two were raised from one another in a circle."""
    first, second = ValueError("a"), OSError("b")
    first.__cause__, second.__cause__ = second, first
    assert without_secrets(first) is first


def test_a_traceback_in_the_engines_logs_shows_no_credentials() -> None:
    """Nor does the error that a filter for files or the server would format."""
    error = raised(OSError("API request to http://me:hidden@127.0.0.1:9/api failed"))
    _passes, record = logged(error, "Encountered exception during execution")
    assert record.exc_info is not None
    assert "hidden" not in logging.Formatter().format(record)
    assert "http://***@127.0.0.1:9/api" in logging.Formatter().format(record)


def test_what_the_engine_logs_shows_no_credentials_and_a_cancelled_task_is_no_error() -> None:
    """Also where an error is shown as Python writes it."""
    _passes, record = logged(ConnectionError("a"), "failed with ConnectionError('s3://me:hidden@host')")
    assert record.getMessage() == "failed with ConnectionError('s3://***@host')"
    line = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, "Finished in state Cancelled('a')", (), None)
    assert OneSentence().filter(line)
    assert line.levelno == logging.INFO


@pytest.mark.parametrize(("cancelled", "level"), [(True, logging.INFO), (False, logging.ERROR)])
@pytest.mark.parametrize(
    "message",
    [
        "Crash detected! Execution was aborted by a termination signal.",
        "Finished in state Crashed('Execution was aborted by a termination signal.')",
    ],
)
def test_a_signal_is_no_crash_where_the_run_is_being_cancelled(message: str, cancelled: bool, level: int) -> None:
    """The engine takes it for one where it comes while a task waits to be tried again."""
    line = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, message, (), None)
    assert OneSentence(lambda: cancelled).filter(line)
    assert line.levelno == level
    assert ("Crash" in line.getMessage()) == (not cancelled)
    other = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, "Crash detected! Out of memory", (), None)
    assert OneSentence(lambda: cancelled).filter(other)
    assert other.levelno == logging.ERROR
