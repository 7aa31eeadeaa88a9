"""Homes that were moved or copied: MLflow's files are found and written in the home alone."""

import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef, RunRef
from tasks.storage import Storage, resolve_storage
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.files import log_text
from tasks.tracking.models import model_with_alias
from tasks.tracking.runs import find_data_checks, log_data_checks, read_artifact
from tasks.tracking.server import check_tracking, client_of
from tasks.tracking.tracked_run import tracked_run
from tasks.tracking.trained import download_weights
from tests.builders.homes import home_with_tracking
from tests.builders.tracked_homes import CARD, log_champion, tables_in_database

ODD = "a home% of#ümläut %20"


@dataclass(frozen=True)
class Original:
    """A home with a champion, of which each test has a copy."""

    storage: Storage
    model: ModelRef

    @property
    def home(self) -> Path:
        """Its folder."""
        return Path(self.storage.home)


@pytest.fixture(scope="module", params=["home", ODD])
def original(request, tmp_path_factory, empty_tracking) -> Original:
    """Return a home with a champion."""
    folder = tmp_path_factory.mktemp("original")
    storage = home_with_tracking(folder / request.param, empty_tracking)
    return Original(storage, log_champion(storage, folder / "scratch"))


@pytest.fixture(params=["this release", "one that recorded no home"])
def is_recorded(request) -> bool:
    """Return whether the database of a home has the home's path."""
    return request.param == "this release"


@pytest.fixture
def renamed(original) -> Iterator[None]:
    """Give the original home another name during a test, so that nothing is at its path."""
    away = original.home.with_name("away")
    original.home.rename(away)
    yield
    assert not original.home.exists()
    away.rename(original.home)


def storage_at(home: Path, **others: str) -> Storage:
    """Return the storage of a home."""
    return resolve_storage(StorageConfig(home=str(home), **others))


def forget_home(storage: Storage) -> None:
    """Remove the home's path from its database."""
    with closing(sqlite3.connect(Path(storage.home) / "mlflow.db")) as connection, connection:
        connection.execute("DELETE FROM experiment_tags WHERE key = 'lakevision.home'")


def contents(home: Path) -> dict[str, bytes]:
    """Return the content of every file of a home."""
    return {str(file.relative_to(home)): file.read_bytes() for file in home.rglob("*") if file.is_file()}


def test_moved_home_reads_and_writes_its_own_files(original, tmp_path, renamed, is_recorded):
    """The former path is not made again."""
    away, model = original.home.with_name("away"), original.model
    moved = storage_at(tmp_path / "elsewhere" / original.home.name)
    shutil.copytree(away, moved.home)
    if not is_recorded:
        forget_home(moved)

    check_tracking(moved)
    assert model_with_alias(moved, "photos", "champion") == model
    folder = fetch_registered(moved, model, tmp_path / "fetched")
    assert (folder / "model.json").read_text() == "model.json of the model"
    run = RunRef(run_id=model.run_id)
    assert read_artifact(moved, run, CARD) == b"# the card"
    assert download_weights(moved, run, tmp_path / "weights").read_text() == "weights.safetensors of the model"
    assert find_data_checks(moved, "checks") == {"leaked": 0}
    assert tables_in_database(moved, model) == {moved.table("images"), f"{moved.cache}/0f0f"}
    # Models are named by the source of their table.
    assert client_of(moved).get_run(model.run_id).data.params["data.source"] == f"{original.home}/photos"
    log_champion(moved, tmp_path / "scratch")
    log_data_checks(moved, "checks", "others", {"leaked": 1}, {}, {}, {})
    assert find_data_checks(moved, "others") == {"leaked": 1}
    assert len(list(Path(moved.home).glob(f"artifacts/*/artifacts/{CARD}"))) == 2


def test_copied_home_leaves_the_original_alone(original, tmp_path, is_recorded):
    """Both have the same ids of runs and models; nothing is read from the other one, or written there."""
    model, run = original.model, RunRef(run_id=original.model.run_id)
    copied = storage_at(tmp_path / "copy")
    shutil.copytree(original.home, copied.home)
    if not is_recorded:
        forget_home(copied)
    assert read_artifact(original.storage, run, CARD) == b"# the card"
    for file in Path(copied.home).rglob(f"artifacts/*/artifacts/{CARD}"):
        file.write_text("of the copy")
    before = contents(original.home)

    check_tracking(copied)
    assert read_artifact(copied, run, CARD) == b"of the copy"
    fetch_registered(copied, model, tmp_path / "fetched")
    assert tables_in_database(copied, model) == {copied.table("images"), f"{copied.cache}/0f0f"}
    with tracked_run(copied, "another", "another", {}, {}, None) as another:
        another.log_text("# another", CARD)
    assert Path(copied.home, "artifacts", another.run_id, "artifacts", CARD).read_text() == "# another"
    assert contents(original.home) == before
    assert read_artifact(original.storage, run, CARD) == b"# the card"


def test_home_that_several_processes_open_at_a_new_path_has_that_one(original, tmp_path, messages_of, caplog):
    """A server that is running reads the files there as well."""
    caplog.set_level("INFO", "lakevision.tracking")
    copied = storage_at(tmp_path / "copy")
    shutil.copytree(original.home, copied.home)
    server = MlflowClient(copied.tracking)  # with its own connections, as a server has them
    assert server.get_run(original.model.run_id).info.artifact_uri.startswith(original.home.as_uri())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client_of, [copied] * 8))
    assert server.get_run(original.model.run_id).info.artifact_uri.startswith(Path(copied.home).as_uri())
    assert [line for line in messages_of("lakevision.tracking") if "was at" in line] == [
        f"the home '{copied.home}' was at '{original.home}': the paths in its MLflow database are replaced"
    ]


def test_home_that_is_opened_at_another_path_meanwhile_keeps_its_files(original, tmp_path):
    """A machine that mounts it elsewhere replaces the path, and no file is written to that one here."""
    copied = storage_at(tmp_path / "copy")
    shutil.copytree(original.home, copied.home)
    check_tracking(copied)
    elsewhere = tmp_path / "elsewhere"
    Path(copied.home).rename(elsewhere)
    check_tracking(storage_at(elsewhere))  # as the other machine does at its start
    elsewhere.rename(copied.home)
    log_text(copied, original.model.run_id, "# new", "new.md")
    assert Path(copied.home, "artifacts", original.model.run_id, "artifacts", "new.md").read_text() == "# new"
    assert not elsewhere.exists()


def test_home_that_is_opened_by_a_link_keeps_its_path(original, tmp_path, is_recorded):
    """Both names lead to the same files."""
    if not is_recorded:
        forget_home(original.storage)
    (tmp_path / "link").symlink_to(original.home)
    before = contents(original.home / "artifacts")
    check_tracking(storage_at(tmp_path / "link"))
    assert tables_in_database(original.storage, original.model) == {
        original.storage.table("images"),
        f"{original.storage.cache}/0f0f",
    }
    run = client_of(storage_at(tmp_path / "link")).get_run(original.model.run_id)
    assert run.info.artifact_uri.startswith(original.home.as_uri())
    assert contents(original.home / "artifacts") == before


def test_moved_home_that_cannot_be_written_is_refused_with_both_paths(original, tmp_path, monkeypatch):
    """Its artifacts would be looked for at the former path."""
    copied = storage_at(tmp_path / "copy")
    shutil.copytree(original.home, copied.home)
    forget_home(original.storage)
    connect = sqlite3.connect
    monkeypatch.setattr(
        "tasks.tracking.moved_home.sqlite3.connect",
        lambda database, **others: connect(f"{Path(database).as_uri()}?mode=ro", uri=True, **others),
    )
    with pytest.raises(WrongInput, match=f"'{copied.home}' .*'{original.home}', .*readonly"):
        check_tracking(copied)
    check_tracking(original.storage)


@pytest.mark.parametrize("name", ["store", "artifacts"])
def test_chosen_artifacts_stay_where_they_are_and_are_missed_with_both_paths(make_home, tmp_path, name):
    """A moved home finds them; where they were moved as well, MLflow would make their folder again."""
    home = Path(make_home("home").home)
    store = tmp_path / "disk" / name
    chosen = storage_at(home, artifacts=str(store))
    model = log_champion(chosen, tmp_path / "scratch")
    forget_home(chosen)
    moved = storage_at(tmp_path / "moved")
    home.rename(moved.home)
    assert read_artifact(moved, RunRef(run_id=model.run_id), CARD) == b"# the card"
    assert not Path(moved.home, "artifacts").exists()
    store.rename(tmp_path / "disk" / "away")
    for storage in (moved, storage_at(Path(moved.home), artifacts=str(store))):
        with pytest.raises(WrongInput, match=f"artifacts in '{store}', .* '{moved.home}'"):
            check_tracking(storage)
        with pytest.raises(WrongInput, match=f"'{store}', .* whose home is '{moved.home}'"):
            log_champion(storage, tmp_path / "scratch")
        with pytest.raises(WrongInput, match=f"files in '{store}/.*, .* '{moved.home}'"):
            fetch_registered(storage, model, tmp_path / "fetched")
    assert not store.exists()
    with pytest.raises(WrongInput, match=f"artifacts is '{tmp_path}/disk/away', .*{store}'"):
        check_tracking(storage_at(Path(moved.home), artifacts=str(tmp_path / "disk" / "away")))
