"""The demo: its tables and model, and the log of a run as it prints it."""

import re
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from deployments import demo
from deployments.demo import _show_log, parameters, parse_arguments, stream_parameters, without_download
from tasks.config.pipeline import PipelineConfig
from tasks.config.prediction import StreamRun
from tasks.errors import WrongInput


class Server:
    """A server with the log lines of one flow run."""

    def __init__(self, lines: list[SimpleNamespace]) -> None:
        self._lines = lines

    def read_flow_runs(self, **_filters: Any) -> list[SimpleNamespace]:
        """Return no runs that the run has submitted."""
        return []

    def read_logs(self, *_filters: Any, **_options: Any) -> list[SimpleNamespace]:
        """Return the lines, the newest first."""
        return self._lines[::-1]


def line(run: UUID, message: str, task: UUID | None = None) -> SimpleNamespace:
    """Return one line of a run, or of a stage of it."""
    return SimpleNamespace(
        id=uuid4(), flow_run_id=run, task_run_id=task, message=message, timestamp=datetime(2026, 1, 1, tzinfo=UTC)
    )


def test_log_has_ended_with_the_last_line_of_the_flow_and_not_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of the last stage may arrive after the line with its state."""
    run, task = uuid4(), uuid4()
    lines = [line(run, "1 image predicted", task), line(run, "Finished in state Completed()", task)]
    shown: set[UUID] = set()

    assert not _show_log(Server(lines), run, shown)
    assert _show_log(Server([*lines, line(run, "Finished in state Completed()")]), run, shown)
    assert capsys.readouterr().out.splitlines() == ["00:00:00  1 image predicted"]


def settings(*options: str) -> PipelineConfig:
    """Return the settings of the demo's run of the DAG with these options."""
    return PipelineConfig.model_validate(parameters(parse_arguments(options))["config"])


def test_own_images_start_from_pretrained_weights_where_they_can_be_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a network is trained from scratch, after a line that says so; what the user chose stays."""
    tried: list[tuple[str, str]] = []
    found = settings("--source", "/data/photos")
    assert (found.train.weights, found.train.recipe, found.cache.image_size) == ("DEFAULT", "auto", 224)

    def load(model: str, weights: str) -> None:
        tried.append((model, weights))
        if model == "mobilenet_v2":
            raise WrongInput("the weights could not be downloaded", way_out="give a path")

    monkeypatch.setattr(demo, "load_weights", load)
    for given, is_without in (
        (("--source", "/data/photos"), True),
        (("--source", "/data/photos", "--model", "resnet18"), False),
        (("--source", "/data/photos", "--weights", "DEFAULT"), False),
        ((), False),
    ):
        assert without_download(parse_arguments(given)) == is_without
    assert tried == [("mobilenet_v2", "DEFAULT"), ("resnet18", "DEFAULT")]
    assert "the weights could not be downloaded: a network is trained from scratch" in capsys.readouterr().out


def test_each_source_of_the_demo_has_tables_of_its_own_and_none_is_replaced() -> None:
    """Not those of other runs: the default ones, or those of the deployment `photos`."""
    sources = ("/data/photos", "/other/photos", "/data/", "s3a://bucket/photos", "/data/пример", "/")
    found = [settings(), *(settings("--source", source) for source in sources)]
    tables = [config.storage.tables or "tables" for config in found]
    assert not any(config.etl.replace_source for config in found)
    assert len({*tables, "tables", "photos-tables"}) == len(found) + 2
    assert all(re.fullmatch("demo-[a-z0-9-]{1,50}", name) for name in tables)
    assert tables[0] == "demo-digits"
    assert re.fullmatch("demo-photos-[0-9a-f]{6}", tables[1])
    assert settings("--source", "/data/photos/").storage.tables == tables[1]


def test_model_of_the_demo_is_not_that_of_other_tables_of_the_digits() -> None:
    """All tables of the digits have the same default name; a folder has its own."""
    assert settings().promote.model_name == "demo-digits"
    assert settings("--source", "/data/photos").promote.model_name is None


def test_demo_trains_own_photos_once() -> None:
    """Only the digits, which take seconds, are trained in one process and with ranks."""
    assert settings("--source", "/data/photos").train_on == "single"
    assert settings().train_on == "both"


@pytest.mark.parametrize(("options", "streams"), [((), ["demo-digits"]), (("--source", "{folder}"), [])])
def test_only_the_digits_are_streamed(
    options: tuple[str, ...],
    streams: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """New images of a user are for the user to add; one image is predicted over HTTP at the end in any case."""
    asked: list[str] = []
    shown: list[object] = []
    stack = SimpleNamespace(environment={}, home=tmp_path)
    monkeypatch.setenv("LAKEVISION_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "interrupt_on", lambda *_numbers: None)
    monkeypatch.setattr(demo, "check_parameters", lambda *_given: None)
    monkeypatch.setattr(demo, "without_download", lambda _options: False)
    monkeypatch.setattr(demo, "local_stack", lambda *_given: nullcontext(stack))
    monkeypatch.setattr(demo, "follow_run", lambda *_given: ("run", {"model": "model"}))
    monkeypatch.setattr(demo, "run_stream", lambda _stack, tables, _model: asked.append(tables) or "report")
    monkeypatch.setattr(demo, "ask_service", lambda _home, tables, model: [f"{tables} {model}"])
    monkeypatch.setattr(demo, "show_summary", lambda *given: shown.append(given[3]))
    assert demo.main([option.format(folder=tmp_path) for option in options]) == 0
    assert asked == streams
    assert shown == (["report"] if streams else [None])
    assert capsys.readouterr().out.splitlines()[-3].endswith(" model")


def test_stream_of_the_demo_writes_to_its_tables() -> None:
    """Predictions and the position of the stream are beside the demo's table of images."""
    values = stream_parameters("/home/demo-digits/arrivals", "demo-digits", "demo-digits")
    config = StreamRun.model_validate(values["config"])
    assert (config.storage.tables, config.predict.table) == ("demo-digits", "/home/demo-digits/arrivals")
