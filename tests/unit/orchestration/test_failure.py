"""Tests of the explanation of failed runs."""

import gc
import logging
import traceback
from typing import Any
from weakref import ref

import pytest

from flows.command_line import _drop_frames
from flows.train_trial import train_trial
from tasks.errors import DiskFull, TimeLimitExceeded, WrongInput, join_names
from tasks.orchestration.failure import (
    EngineLogFilter,
    failure_markdown,
    state_message,
    without_secrets,
)


def advice(error: WrongInput) -> list[str]:
    """Return the lines with settings and ways out that explain an error."""
    lines = failure_markdown(error, None).splitlines()
    return [line for line in lines if line.startswith("- ") and "log" not in line]


def refused(parameters: dict[str, Any]) -> WrongInput:
    """Return the error of a flow that was started with these parameters."""
    with pytest.raises(WrongInput) as raised:
        train_trial.validate_parameters(parameters)
    return raised.value


@pytest.mark.parametrize(
    ("config", "setting", "way_out"),
    [
        ({"number": -1}, "number", "input should be greater than or equal to 0"),
        ({"number": 1}, "study", "give both for a trial, neither otherwise"),
        ({"train": {"finetune": []}}, "train.finetune", "did you mean fine_tune?"),
        ({"train": {"fine_tune": [{"unfreeze_from": ""}]}}, "train.fine_tune.0.unfreeze_from", "string should have at"),
        ({"train": {"weights": "none", "freeze_backbone": True}}, "train.freeze_backbone", "set freeze_backbone to"),
        ({"spark": {"conf": {"spark.executor.cores": None}}}, "spark.conf.spark.executor.cores", "input should be a"),
        ({"spark": {"master": "a"}}, "spark.master", "give local\\[\\*\\]"),
        ({"storage": {"home": "s3://a:b@c/d"}}, "storage.home", "give them in the environment or in a credential"),
        ({"tune": {"search": {"seed": {"low": 2, "high": 1}}}}, "tune.search.seed.range.low", "make low the smaller"),
    ],
)
def test_setting_and_advice_of_refused_parameters_are_those_of_the_models(
    config: dict[str, Any], setting: str, way_out: str
) -> None:
    """A setting has its group, also where a validator of the group refused it, and not the name of the parameter."""
    shown, advised = advice(refused({"config": config}))
    assert shown == f"- Setting: `{setting}`"
    assert advised.startswith(f"- Way out: {way_out}")


def test_error_without_setting_has_no_advice() -> None:
    """Nothing is guessed from the sentence."""
    assert advice(WrongInput("'x' of tasks/etl/read.py is not there")) == []
    assert advice(WrongInput("storage.home is '/data: etl.source', which is full", way_out="make room")) == [
        "- Way out: make room"
    ]


def test_each_of_several_errors_has_its_own_line() -> None:
    """Each line has the setting and the advice of the same error."""
    config = {"storage": {"home": "it's; a\n"}, "train": {"seed": 0, "device": "gpu"}, "study": "a"}
    assert advice(refused({"config": config})) == [
        "- Setting: `storage.home`. Way out: leave that out",
        "- Setting: `train.seed`. Way out: input should be greater than or equal to 1",
        "- Setting: `train.device`. Way out: input should be 'auto', 'cpu' or 'cuda'",
    ]


def test_message_and_artifact_begin_with_the_sentence_without_credentials() -> None:
    """The message ends with the type of the error, which the parent run needs."""
    sentence = "storage.tracking is 'http://me:hidden@host', which does not answer"
    error = WrongInput(sentence, setting="storage.tracking", way_out="start it")
    assert state_message(error) == (
        "storage.tracking is 'http://***@host', which does not answer: start it (WrongInput)"
    )
    text = failure_markdown(error, "http://ui/run", ["Submitted training: [a](http://ui/child)"])
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


def test_sentence_is_escaped_in_the_artifact() -> None:
    """File names and values in it may have HTML or Markdown."""
    text = failure_markdown(WrongInput("'<img src=x>\n# [click](http://evil)' is not an image"), None)
    assert "<img" not in text.replace("\\<", "")
    assert "](http://evil)" not in text.replace("\\]", "")
    assert "\n# [" not in text


def test_unexpected_error_is_shown_with_its_location_in_the_code() -> None:
    """The location is the innermost frame in the project's code, not in a library or a test."""
    with pytest.raises(TypeError) as raised:
        join_names(["a"], None)  # type: ignore[arg-type]  # a stand-in with the attributes that are used
    text = failure_markdown(raised.value, None)
    assert "**TypeError: " in text
    assert "`tasks/errors.py, line " in text
    assert ", in join_names`" in text
    assert "the log below has its traceback" in text


def logged(error: Exception, message: str) -> tuple[bool, logging.LogRecord]:
    """Filter a log record of an error, and return whether it passed, and the record."""
    exc_info = (type(error), error, None)
    record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, message, (), exc_info)
    return EngineLogFilter().filter(record), record


@pytest.mark.parametrize("error", [WrongInput("a"), TimeLimitExceeded("a"), DiskFull("a")])
def test_user_errors_are_logged_without_a_traceback(error: Exception) -> None:
    """The flow logs their sentence once, and the engine's repetition is dropped."""
    passes, record = logged(error, "Task run failed with exception")
    assert passes
    assert record.exc_info is None
    assert not logged(error, "Engine execution exited with unexpected exception")[0]


def test_unexpected_errors_are_logged_with_their_traceback() -> None:
    """All lines of the engine about such an error pass the filter."""
    for message in ("Encountered exception during execution", "Engine execution exited with unexpected exception"):
        passes, record = logged(ConnectionError("a"), message)
        assert passes
        assert record.exc_info is not None


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Raise and catch an error, so that it has a traceback, and return it."""
    try:
        raise error from cause  # noqa: TRY301  # raised to be caught
    except Exception as caught:
        return caught


@pytest.mark.parametrize("hidden_in_cause", [False, True])
def test_unexpected_error_is_replaced_if_it_shows_a_password(hidden_in_cause: bool) -> None:
    """Prefect would log its text and those of its causes; the replacement keeps type and traceback."""
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


def test_errors_without_credentials_are_unchanged() -> None:
    """The search for credentials ends even if two errors are causes of each other."""
    first, second = ValueError("a"), OSError("b")
    first.__cause__, second.__cause__ = second, first
    assert without_secrets(first) is first


def test_tracebacks_in_logs_of_the_engine_have_no_credentials() -> None:
    """The formatted record has the error's text with the credentials replaced."""
    error = raised(OSError("API request to http://me:hidden@127.0.0.1:9/api failed"))
    _passes, record = logged(error, "Encountered exception during execution")
    assert record.exc_info is not None
    assert "hidden" not in logging.Formatter().format(record)
    assert "http://***@127.0.0.1:9/api" in logging.Formatter().format(record)


class WithoutText(Exception):
    """An error like those of py4j, whose text is asked from a JVM that is gone."""

    def __str__(self) -> str:
        """Raise an error."""
        raise ConnectionRefusedError(111, "Connection refused")


def test_error_without_a_text_ends_a_run_like_any_other() -> None:
    """Neither a filter nor a redaction raises: Prefect's engine would break, and the run stay in state Running."""
    error = raised(WithoutText())
    shown = "WithoutText without a text (ConnectionRefusedError)"
    assert state_message(error) == f"{shown} (WithoutText)"
    assert f"**WithoutText: {shown}**" in failure_markdown(error, None)
    assert str(WrongInput(error)) == shown
    clean = without_secrets(error)
    assert str(clean) == f"WithoutText: {shown}"
    assert "in raised" in "".join(traceback.format_exception(clean))
    caused = raised(ValueError("it failed"), error)
    assert without_secrets(caused) is caused
    passes, record = logged(error, "Encountered exception during execution: %s")
    assert passes
    assert "WithoutText" in logging.Formatter().format(record)


def test_engine_line_that_cannot_be_formatted_passes_the_filter() -> None:
    """The values of its message may raise, or be too few."""
    for message, values in (("failed with %r", (WithoutText(),)), ("failed: %s", (WithoutText(),)), ("%s %s", ("a",))):
        record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, message, values, None)
        assert EngineLogFilter().filter(record)
        assert "failed" in record.getMessage() or "%s %s (this line's values" in record.getMessage()


class Held:
    """A value in the frame of a failed function."""


def test_frames_of_a_failed_flow_are_dropped_before_the_process_ends() -> None:
    """A state of Prefect keeps the error; DuckDB writes 45 lines at the exit if its frames still hold a database."""
    held: list[ref[Held]] = []

    def fail() -> None:
        value = Held()
        held.append(ref(value))
        raise ValueError

    def fail_again() -> None:
        try:
            fail()
        except ValueError:
            raise WrongInput("a") from None

    with pytest.raises(WrongInput) as refused:
        fail_again()
    assert held[0]() is not None
    error = refused.value
    del refused
    _drop_frames(error)
    gc.collect()
    assert held[0]() is None


def test_messages_of_the_engine_have_no_credentials_and_cancelled_tasks_are_logged_as_info() -> None:
    """Credentials are also removed from the `repr` of an error."""
    _passes, record = logged(ConnectionError("a"), "failed with ConnectionError('s3://me:hidden@host')")
    assert record.getMessage() == "failed with ConnectionError('s3://***@host')"
    line = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, "Finished in state Cancelled('a')", (), None)
    assert EngineLogFilter().filter(line)
    assert line.levelno == logging.INFO


@pytest.mark.parametrize(("cancelled", "level"), [(True, logging.INFO), (False, logging.ERROR)])
@pytest.mark.parametrize(
    "message",
    [
        "Crash detected! Execution was aborted by a termination signal.",
        "Finished in state Crashed('Execution was aborted by a termination signal.')",
    ],
)
def test_signal_during_cancellation_is_not_logged_as_a_crash(message: str, cancelled: bool, level: int) -> None:
    """The engine reports a crash if the signal comes while a task waits for its retry."""
    line = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, message, (), None)
    assert EngineLogFilter(lambda: cancelled).filter(line)
    assert line.levelno == level
    assert ("Crash" in line.getMessage()) == (not cancelled)
    other = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, "Crash detected! Out of memory", (), None)
    assert EngineLogFilter(lambda: cancelled).filter(other)
    assert other.levelno == logging.ERROR
