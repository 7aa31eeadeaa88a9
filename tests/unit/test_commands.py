"""The commands after a run: each is accepted by its flow, with the run's tables and model."""

import json
import shlex
from pathlib import Path

import pytest

from flows.command_line import parse_arguments
from tasks.commands import command_lines, next_commands
from tasks.config.prediction import PredictRun, PromoteRun, StreamRun
from tasks.config.promotion import RollbackRun
from tasks.config.serving import ServeRun
from tasks.config.storage import StorageConfig
from tasks.config.tune import TuneRun
from tasks.storage import Storage, resolve_storage

STORAGE = resolve_storage(
    StorageConfig(home="/data/my photos", tables="cats", tracking="sqlite:////data/my photos/mlflow.db")
)

NETWORK = {"model": "resnet18", "weights": "none", "freeze_backbone": "false", "image_size": "64"}

FLOWS = {
    "flows.predict_batch": PredictRun,
    "flows.predict_stream": StreamRun,
    "flows.tune": TuneRun,
    "flows.promote": PromoteRun,
    "flows.rollback": RollbackRun,
    "flows.serve": ServeRun,
}


def test_each_command_is_accepted_with_tables_and_model_of_the_run() -> None:
    """The words after `-m` are a flow and its options, which name the tables, and the model except in a search."""
    found = next_commands(STORAGE, "lakevision-cats", NETWORK)
    seen = set()
    for command in (part for text in found.values() for part in text.split(" && ") if "-m flows." in part):
        python, _m, flow, *options = shlex.split(command)
        config = parse_arguments(FLOWS[flow], flow, options)
        seen.add(flow)
        assert python == ".venv/bin/python"
        assert resolve_storage(config.storage).tables == "/data/my photos/cats"
        if flow != "flows.tune":
            group = config.rollback if flow == "flows.rollback" else config.promote
            assert group.model_name == "lakevision-cats"
    assert seen == FLOWS.keys()
    assert "--model resnet18 --weights none --freeze_backbone false --image_size 64" in found["improve"]


def test_served_and_scheduled_is_the_model_of_the_run() -> None:
    """The deployment has a schedule, and parameters that its flow accepts."""
    found = next_commands(STORAGE, "lakevision-cats", {})
    assert found["serve"].startswith(".venv/bin/python -m flows.serve ")
    words = shlex.split(found["schedule (make up)"])
    config = PredictRun.model_validate(json.loads(words[words.index("--params") + 1])["config"])
    assert (config.promote.model_name, config.predict.source) == ("lakevision-cats", "FOLDER")
    assert resolve_storage(config.storage) == STORAGE
    assert words[words.index("--cron") + 1] == "0 * * * *"


def test_password_of_a_tracking_server_is_in_no_command() -> None:
    """Each process takes it from its own environment."""
    secret = STORAGE.model_copy(update={"tracking": "http://me:secret@mlflow:5000"})
    assert "secret" not in "\n".join(command_lines(next_commands(secret, "cats", {})))


def test_storage_of_the_default_home_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home ./.lakevision with its tables is what a flow uses without options."""
    monkeypatch.chdir(tmp_path)
    default = Storage(
        **{name: f"{tmp_path}/.lakevision/{name}" for name in ("tables", "cache", "artifacts")},
        home=f"{tmp_path}/.lakevision",
        tracking=f"sqlite:///{tmp_path}/.lakevision/mlflow.db",
    )
    assert default.options == []
    other = default.model_copy(update={"tables": "s3a://bucket/tables"})
    assert other.options == ["--tables", "s3a://bucket/tables"]
