"""Tests of the parsing of untrusted values from MLflow."""

from collections.abc import Callable

import pytest

from tasks.errors import WrongInput
from tasks.refs import TableRef
from tasks.tracking.registry_values import checked_run_id, share, whole_number
from tasks.tracking.trained_tables import served_tables, serving_tags

MessagesOf = Callable[[str], list[str]]


@pytest.mark.parametrize("bad", ["x", "", "-1", "1.0", "\u0663", "1" * 400, "nan", "3\n"])
def test_invalid_whole_number_is_ignored(messages_of: MessagesOf, bad: str) -> None:
    """The value is treated as absent, and a warning of one line names it."""
    assert whole_number({"version": bad}, "version", "photos version 1") is None
    (line,) = messages_of("lakevision.tracking")
    assert line.startswith("version of photos version 1 is '")
    assert "\n" not in line
    assert whole_number({"version": "12"}, "version", "") == 12
    assert whole_number({}, "version", "") is None


@pytest.mark.parametrize("bad", ["nan", "inf", "x", "1.1", "-0.5", float("nan"), 7.0])
def test_invalid_accuracy_is_ignored(messages_of: MessagesOf, bad: str | float) -> None:
    """The value is treated as absent: a champion with the accuracy NaN could never be replaced."""
    assert share({"accuracy": bad}, "accuracy", "photos version 1") is None
    assert len(messages_of("lakevision.tracking")) == 1
    assert share({"accuracy": "0.5"}, "accuracy", "") == share({"accuracy": 0.5}, "accuracy", "") == 0.5


@pytest.mark.parametrize("bad", [None, "", "/../../x", "a b", "a" * 300])
def test_invalid_run_id_is_refused(bad: str | None) -> None:
    """The error names the model version and the way out."""
    with pytest.raises(WrongInput, match="photos version 1 names the MLflow run"):
        checked_run_id(bad, "photos version 1")
    assert checked_run_id("5c7e", "") == "5c7e"


def test_serving_tags_name_the_tables_of_a_champion(messages_of: MessagesOf) -> None:
    """There is one tag per table; tags with invalid values are ignored with a warning."""
    table = TableRef(path="/b/images", version=4, table_id="b-1")
    tags = serving_tags(table, "/data/photos")
    assert list(tags) == ["lakevision.serves.b-1"]
    bad = {"lakevision.serves.x": "{", "lakevision.serves.y": '{"path": "/", "version": "1"}', "other": "1"}
    assert list(served_tables(tags | bad, "v")) == [table.model_copy(update={"source": "/data/photos"})]
    assert len(messages_of("lakevision.tracking")) == 2
    assert serving_tags(TableRef(path="/", version=1), "") == {}
