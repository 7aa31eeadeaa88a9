"""The tables of a run that names none."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from tasks.config.maintenance import MaintainRun
from tasks.config.prediction import PredictRun, PromoteRun, StreamRun
from tasks.config.promotion import RollbackRun
from tasks.config.run import SparkRun
from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.storage import Storage
from tasks.tables.chosen import chosen_tables
from tasks.tables.snapshots import latest


def write_table(path: Path, seconds: int) -> None:
    """Write a table whose commit is this old, in seconds since 2001."""
    deltalake.write_deltalake(path, pa.table({"label": ["cat"]}))
    for commit in (path / "_delta_log").glob("*.json"):
        os.utime(commit, (1e9 + seconds, 1e9 + seconds))


def test_run_without_tables_takes_those_of_the_newest_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names them; given tables, and a home without any, are left as they are."""
    caplog.set_level("INFO", logger="lakevision.tables")
    config = StorageConfig(home=str(tmp_path))
    assert chosen_tables(config).tables == f"{tmp_path}/tables"
    write_table(tmp_path / "tables" / "images", 1)
    assert chosen_tables(config).tables == f"{tmp_path}/tables"
    assert caplog.messages == []
    write_table(tmp_path / "photos-tables" / "images", 2)
    write_table(tmp_path / "photos-tables" / "arrivals", 4)
    write_table(tmp_path / "others" / "arrivals", 5)
    assert chosen_tables(config).tables == f"{tmp_path}/photos-tables"
    assert caplog.messages == [
        f"storage.tables is empty: '{tmp_path}/photos-tables' has the tables of the newest run in this home"
    ]
    given = StorageConfig(home=str(tmp_path), tables="tables")
    assert chosen_tables(given).tables == f"{tmp_path}/tables"
    assert chosen_tables(StorageConfig(home=str(tmp_path), tables="s3a://b/tables")).tables == "s3a://b/tables"


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("promote", PromoteRun),
        ("rollback", RollbackRun),
        ("predict_batch", PredictRun),
        ("predict_stream", StreamRun),
        ("maintain", MaintainRun),
    ],
)
def test_flows_about_a_trained_model_take_the_tables_of_the_newest_run(
    module: str, config: Callable[..., SparkRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their stage gets a storage with those tables."""
    write_table(tmp_path / "tables" / "images", 1)
    write_table(tmp_path / "photos-tables" / "images", 2)
    found = []

    def record(_stage: object, *given: object, **_options: object) -> None:
        found.extend(one.tables for one in given if isinstance(one, Storage))

    flows = importlib.import_module(f"flows.{module}")
    monkeypatch.setattr(flows, "run_stage", record)
    getattr(flows, module).fn.__wrapped__(config(storage=StorageConfig(home=str(tmp_path))))
    assert found == [f"{tmp_path}/photos-tables"]


def test_sentence_about_a_missing_table_names_those_that_exist(tmp_path: Path) -> None:
    """Without any, it says how to make one; it does not lead to the built-in digits."""
    with pytest.raises(WrongInput, match="is not a Delta table: run the flow etl with your source first"):
        latest(None, f"{tmp_path}/tables/images")
    write_table(tmp_path / "photos-tables" / "images", 1)
    write_table(tmp_path / "demo-digits" / "images", 2)
    with pytest.raises(WrongInput, match=f": set storage.tables: '{tmp_path}' has demo-digits, photos-tables$"):
        latest(None, f"{tmp_path}/tables/images")
