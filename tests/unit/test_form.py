"""Settings in Prefect's form and in the command line's help."""

import json
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # Prefect validates with it; no stubs
from pydantic import Field, ValidationError

from flows.command_line import parse_arguments, run_from_command_line
from flows.decorator import DagFlow
from flows.train_distributed import train_distributed
from flows.train_trial import train_trial
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.form import FOLDED, OPEN
from tasks.config.frozen import FrozenConfig
from tasks.config.maintenance import MaintainRun
from tasks.config.pipeline import PipelineConfig
from tasks.config.prediction import PredictRun, PromoteRun
from tasks.config.run import Run, SparkRun
from tasks.config.train import TrainConfig
from tasks.config.tune import Choices, Range, TrialRun, TuneRun
from tasks.errors import WrongInput
from tasks.refs import CacheRef, Ref
from tests.builders.settings_models import all_models

RUNS = [model for model in all_models() if issubclass(model, Run) and model not in {Run, SparkRun}]


class HalfOpen(FrozenConfig):
    """A setting with one bound, which no flow has at present."""

    steps: int = Field(1, ge=1, description="Steps")


def described(model: type[FrozenConfig], field: str) -> str:
    """Return the description of a setting in the form."""
    text: str = model.model_json_schema()["properties"][field]["description"]
    return text


def refusals(model: type[FrozenConfig], values: dict[str, Any]) -> set[str]:
    """Return the JSON paths of the errors of the form's own validation."""
    return {error.json_path for error in Draft202012Validator(model.model_json_schema()).iter_errors(values)}


@pytest.mark.parametrize(
    ("model", "field", "ending"),
    [
        (EtlConfig, "stored_side", "(16 to 16384)"),
        (EtlConfig, "val_fraction", "(at least 0, less than 1)"),
        (EtlConfig, "max_bad_fraction", "(0 to 1)"),
        (TrainConfig, "learning_rate", "(more than 0, at most 10)"),
        (TrainConfig, "patience", "(1 to 10000)"),
        (TrainConfig, "seed", "(1 to 4294967295)"),
        (TrainConfig, "batch_size", "(1 to 65536)"),
        (TrainConfig, "device", "(one of auto, cpu, cuda)"),
        (HalfOpen, "steps", "(at least 1)"),
        (Choices, "choices", "(2 to 100 entries)"),
    ],
)
def test_bounds_are_in_the_description(model: type[FrozenConfig], field: str, ending: str) -> None:
    """The description ends with the bounds or choices, which the form does not show otherwise."""
    assert described(model, field).endswith(ending)


def test_optional_setting_is_an_empty_field() -> None:
    """The schema omits the alternative None, which the form would show as 'Property is type "None"'."""
    properties = CacheConfig.model_json_schema()["properties"]

    assert properties["keep_gigabytes"]["type"] == "integer"
    assert "default" not in properties["keep_gigabytes"]
    assert properties["keep_days"]["type"] == "integer"
    assert CacheConfig.model_validate({"keep_gigabytes": None}).keep_gigabytes is None


@pytest.mark.parametrize("flow", [train_distributed, train_trial], ids=lambda flow: flow.name)
def test_parameter_from_another_flow_is_not_in_the_form(flow: DagFlow[..., Any]) -> None:
    """The form omits a parameter that only another flow passes, and a run that passes it is accepted."""
    assert list(flow.parameters.properties) == ["config"]
    given = flow.validate_parameters({"cache_ref": {"url": "/cache", "digest": "0"}})
    assert given["cache_ref"] == CacheRef(url="/cache", digest="0")


@pytest.mark.parametrize("model", RUNS, ids=lambda model: model.__name__)
def test_form_begins_with_frequently_changed_settings(model: type[Run]) -> None:
    """Other single settings follow, then the folded groups without the settings shown before."""
    properties = model.model_json_schema()["properties"]
    order = sorted(properties, key=lambda name: properties[name]["position"])
    groups = [name for name in order if "anyOf" in properties[name] and "then" in properties[name]]

    assert order[: len(model.first_screen)] == list(model.first_screen)
    assert groups
    assert order[-len(groups) :] == groups
    for name in groups:
        folded, settings = properties[name]["anyOf"]
        assert (folded["title"], folded["properties"], settings["title"]) == (FOLDED, {}, OPEN)
        assert not settings["properties"].keys() & {
            field for group, field in model.first_screen.values() if group == name
        }
        assert "default" not in properties[name]


def test_setting_has_two_names_and_one_value() -> None:
    """A setting may be given with or without its group's name, and two different values are refused."""
    by_short_name = PipelineConfig.model_validate({"source": "/a", "etl": {"stored_side": 64}})

    assert by_short_name == PipelineConfig.model_validate({"etl": {"source": "/a", "stored_side": 64}})
    assert by_short_name == PipelineConfig.model_validate({"source": "/a", "etl": EtlConfig(stored_side=64)})
    assert PipelineConfig.model_validate(by_short_name.model_dump() | {"source": "/a"}) == by_short_name
    assert PipelineConfig.model_validate({"source": None}) == PipelineConfig()
    with pytest.raises(ValidationError, match="source and etl.source are the same setting"):
        PipelineConfig.model_validate({"source": "/a", "etl": {"source": "/b"}})


@pytest.mark.parametrize(
    ("model", "values", "places"),
    [
        (TuneRun, {"tune": {"search": {"monitor": {"choices": [1, 2]}}}}, {"$.tune.search"}),
        (TuneRun, {"tune": {"search": {"seed": {"choices": [1, 2]}}}}, set()),
        (PredictRun, {"alias": "no name"}, {"$.alias"}),
        (PipelineConfig, {"source": "/a", "etl": {"labels": {"file": "b.txt"}}}, {"$.etl.labels.file"}),
        (PipelineConfig, {"source": "/a", "etl": {"labels": {"file": "b.CSV"}}}, set()),
        (PredictRun, {"spark": {"master": "everywhere"}}, {"$.spark.master"}),
        (PredictRun, {"spark": {"master": "spark://"}}, {"$.spark.master"}),
        (PredictRun, {"spark": {"master": "spark://h:7077,h2:7077"}}, set()),
        (PredictRun, {"spark": {"master": "local[*,3]"}}, set()),
        (PredictRun, {"spark": {"master": "k8s://https://h:443"}}, set()),
        (
            MaintainRun,
            {"maintain": {"vacuum_hours": -1}, "vacuum_hours": -2},
            {"$.maintain.vacuum_hours", "$.vacuum_hours"},
        ),
    ],
)
def test_form_refuses_the_same_values_as_the_models(
    model: type[FrozenConfig], values: dict[str, Any], places: set[str]
) -> None:
    """The form reports an invalid value at its setting and not at the group."""
    assert refusals(model, values) == places


@pytest.mark.parametrize(
    ("model", "values", "is_valid"),
    [
        (TrialRun, {"study": "s"}, False),
        (TrialRun, {"study": "s", "number": 1}, True),
        (Range, {"low": 0, "high": 1, "log": True}, False),
        (Range, {"low": 0, "high": 1}, True),
        (TuneRun, {"tune": {"max_epochs": 3}, "train": {"fine_tune": [{"unfreeze_from": "all"}]}}, False),
        (PromoteRun, {"promote": {"min_accuracy_gain": -0.1, "max_p_value": 0.05}}, False),
        (PromoteRun, {"promote": {"min_accuracy_gain": -0.1}}, True),
        (PromoteRun, {"promote": {"max_p_value": 0.05}}, True),
        (PromoteRun, {"reason": "lost"}, False),
        (PromoteRun, {"reason": "lost", "run_ids": ["a" * 32, "b" * 32]}, False),
        (PromoteRun, {"reason": "lost", "run_ids": ["a" * 32]}, True),
        (PredictRun, {"source": "/a", "table": "/b"}, False),
        (PredictRun, {"source": "/a", "predict": {"table_version": 1}}, False),
        (PredictRun, {"predict": {"source": "/a", "table": "/b"}}, False),
        (PredictRun, {"source": "/a", "table": ""}, True),
        (PredictRun, {"source": "", "table": "/b", "predict": {"table_version": 1}}, True),
        (PipelineConfig, {"source": "/a", "predict": {"table": "/b", "table_version": 1}}, True),
        (PipelineConfig, {"source": "/a", "predict": {"table_version": 1}}, False),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_the_models(
    model: type[FrozenConfig], values: dict[str, Any], *, is_valid: bool
) -> None:
    """The form accepts all of them: the run fails in its first second, with the sentence of the model."""
    assert refusals(model, values) == set()
    if is_valid:
        model.model_validate(values)
        return
    with pytest.raises(ValidationError) as refused:
        model.model_validate(values)
    assert {error["type"] for error in refused.value.errors()} == {"value_error"}


@pytest.mark.parametrize("model", RUNS, ids=lambda model: model.__name__)
def test_form_accepts_the_output_of_the_models(model: type[Run]) -> None:
    """The form accepts settings that one flow passes to the deployment of another."""
    given = model.model_validate({"etl": {"source": "/a"}} if "etl" in model.model_fields else {})

    assert refusals(model, given.model_dump(mode="json", exclude_none=True)) == set()


def help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines of a flow's help."""
    with pytest.raises(SystemExit) as ended:
        parse_arguments(PipelineConfig, "program", arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has one line for each frequently changed setting and for each group."""
    lines = help_text(capsys, "--help")

    assert len(lines) <= 30
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(options) == sorted(
        ["--help-all", "--train_on", *(f"--{name}" for name in PipelineConfig.first_screen)]
    )
    assert any("--image_size int" in line and "(16 to 1024) (default: 224)" in line for line in lines)
    # Under the group of its stage; groups without such a setting follow.
    further = lines.index("further groups:")
    headings = [line.split()[0] for line in lines[:further] if line.endswith("):")]
    others = [line.split()[0] for line in lines[further + 1 :]]
    assert headings == [name for name in PipelineConfig.model_fields if name not in {*others, "train_on"}]
    assert set(headings) == {group for group, _field in PipelineConfig.first_screen.values()}
    assert lines.index(next(line for line in lines if line.startswith("cache ("))) + 1 == lines.index(
        next(line for line in lines if "--image_size" in line)
    )


def test_full_help_has_every_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The full help lists all settings by group, under a heading for each group."""
    lines = help_text(capsys, "--help-all")

    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(options) == len(set(options))
    assert {"--etl.stored_side", "--etl.labels.by", "--train.augmentation.flip", "--source"} <= set(options)
    assert "--etl.source" not in options
    assert "etl.labels options:" in lines


def test_options_have_both_names() -> None:
    """An option may be given with or without its group's name, as in the form and the models."""
    short = parse_arguments(PipelineConfig, "program", ["--source", "/a", "--image_size", "64", "--etl.min_side", "4"])
    by_group = ["--etl.source", "/a", "--cache.image_size", "64", "--etl.min_side", "4"]

    assert short == parse_arguments(PipelineConfig, "program", by_group)
    assert (short.etl.source, short.cache.image_size, short.etl.min_side) == ("/a", 64, 4)


def test_all_invalid_options_are_named() -> None:
    """The error names every invalid option and not only the first."""
    with pytest.raises(ValidationError) as refused:
        parse_arguments(PipelineConfig, "program", ["--image_size", "5", "--max_epochs", "0", "--etl.min_side", "0"])

    assert {error["loc"] for error in refused.value.errors()} == {
        ("cache", "image_size"),
        ("train", "max_epochs"),
        ("etl", "min_side"),
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--image-size", "64"], "unknown option '--image-size': did you mean --image_size or --cache.image_size?"),
        (
            ["--etl.image_size=64"],
            "unknown option '--etl.image_size': did you mean --cache.image_size or --image_size?",
        ),
        (["--epochs", "3"], "unknown option '--epochs': did you mean --max_epochs?"),
        (["--no-such"], "unknown option '--no-such': --help-all lists the options"),
        (["/data/photos"], "unexpected argument '/data/photos': --help-all lists the options"),
    ],
)
def test_misspelt_option_is_refused_with_similar_ones(arguments: list[str], sentence: str) -> None:
    """The message suggests similar options, also if only the group is wrong."""
    with pytest.raises(WrongInput) as refused:
        parse_arguments(PipelineConfig, "program", arguments)

    assert str(refused.value) == sentence


def test_unexpected_error_on_a_terminal_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The password in a URL is masked, as in MLflow's errors, which name the URL of the request."""

    def fail(_config: Run) -> None:
        raise OSError("API request to http://me:hidden@127.0.0.1:9/api failed")

    monkeypatch.setattr("sys.argv", ["program"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("flows.train_trial", None))
    monkeypatch.setattr("flows.command_line._route_logs", lambda _config: "flows.log")
    with pytest.raises(SystemExit) as ended:
        run_from_command_line(fail, TrialRun)  # type: ignore[arg-type]  # called as a flow is

    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "OSError: API request to http://***@127.0.0.1:9/api failed (full log: flows.log)" in printed


def test_terminal_ends_with_the_next_commands_beside_the_json_of_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not among the output that a program parses."""

    class Result(Ref):
        images: int
        next: dict[str, str] = Field({}, repr=False)

    monkeypatch.setattr(sys, "argv", ["flow"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("flows.pipeline", None))
    monkeypatch.setattr("flows.command_line._route_logs", lambda _config: "flows.log")
    run_from_command_line(lambda _config: Result(images=3, next={"serve": "mlflow models serve"}), PipelineConfig)  # type: ignore[arg-type]  # called as a flow is

    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"images": 3}
    assert printed.err.splitlines()[-1].split() == ["serve", "mlflow", "models", "serve"]
