"""Where things lie, resolved once."""

import os
from pathlib import Path

import pytest

from tasks import tracking
from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.paths import local_path
from tasks.storage import resolve_storage


def test_everything_lies_under_the_home(tmp_path: Path) -> None:
    """One folder is enough to say."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))

    assert storage.home == str(tmp_path)
    assert storage.tables == f"{tmp_path}/tables"
    assert storage.cache == f"{tmp_path}/cache"
    assert storage.artifacts == f"{tmp_path}/artifacts"
    assert storage.tracking == f"sqlite:///{tmp_path}/mlflow.db"
    assert storage.logs == tmp_path / "logs"
    assert storage.checkpoints == tmp_path / "checkpoints"


def test_home_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting $LAKEVISION_HOME says where, and a setting wins over it."""
    monkeypatch.setenv("LAKEVISION_HOME", str(tmp_path / "environment"))

    assert resolve_storage(StorageConfig()).home == str(tmp_path / "environment")
    assert resolve_storage(StorageConfig(home=str(tmp_path / "setting"))).home == str(tmp_path / "setting")


def test_home_is_in_the_current_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing said it is ./.lakevision, as an absolute path, and is not made by being named."""
    monkeypatch.delenv("LAKEVISION_HOME", raising=False)
    monkeypatch.chdir(tmp_path)

    assert resolve_storage(StorageConfig()).home == str(tmp_path / ".lakevision")
    assert list(tmp_path.iterdir()) == []


def test_relative_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts in another folder finds the same place; ~ is the user's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    storage = resolve_storage(StorageConfig(home="home", tables="./tables", cache="~/cache"))

    assert storage.home == str(tmp_path / "home")
    assert storage.tables == str(tmp_path / "tables")
    assert storage.cache == "/home/someone/cache"
    assert storage.artifacts == str(tmp_path / "home" / "artifacts")


@pytest.mark.parametrize("name", ["photos-tables", "photos.2", "größe 中"])
def test_a_name_for_the_tables_lies_below_the_home(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a deployment can preset another folder for its tables without knowing the home."""
    monkeypatch.chdir("/")

    assert resolve_storage(StorageConfig(home=str(tmp_path), tables=name)).tables == f"{tmp_path}/{name}"


@pytest.mark.parametrize(
    ("given", "tables"),
    [("/a", "/a"), ("a/b", "/work/a/b"), (".", "/work"), ("..", "/work/.."), ("~", "/home/me"), ("s3a://b", "s3a://b")],
)
def test_any_other_path_for_the_tables_does_not(given: str, tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is relative to the current folder, as elsewhere."""
    monkeypatch.setattr(os, "getcwd", lambda: "/work")
    monkeypatch.setenv("HOME", "/home/me")

    assert resolve_storage(StorageConfig(home="/h", tables=given)).tables == tables


def test_urls_are_left_as_they_are(tmp_path: Path) -> None:
    """Object stores and servers are named as given."""
    storage = resolve_storage(
        StorageConfig(
            home=str(tmp_path), tables="s3a://bucket/tables", cache="gs://bucket/cache", tracking="http://mlflow:5000"
        )
    )

    assert (storage.tables, storage.cache) == ("s3a://bucket/tables", "gs://bucket/cache")
    assert storage.tracking == "http://mlflow:5000"


def test_table_is_a_folder_in_tables() -> None:
    """With or without a slash at the end."""
    for tables in ("s3a://bucket/tables", "s3a://bucket/tables/"):
        storage = resolve_storage(StorageConfig(home="/home", tables=tables))
        assert storage.table("images") == "s3a://bucket/tables/images"


def test_storage_resolves_to_itself_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to a worker means the same there, whatever its folder and environment."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path / "home"), tables="s3a://bucket/tables"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("LAKEVISION_HOME", "/other")

    assert resolve_storage(storage.as_config()) == storage


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/images", Path("/data/images")),
        ("relative/folder", Path("relative/folder")),
        ("file:///data/images", Path("/data/images")),
        ("/data/a=b 100%/#ä", Path("/data/a=b 100%/#ä")),
        ("s3a://bucket/images", None),
        ("abfss://container@account/images", None),
        ("hdfs://namenode/images", None),
    ],
)
def test_local_path_is_that_of_a_folder_or_file_url(url: str, path: Path | None) -> None:
    """Whatever is on this machine has a path, an object store has none."""
    assert local_path(url) == path


def test_file_url_is_unescaped() -> None:
    """%20 in a URL is a space in the path."""
    assert local_path("file:///my%20data") == Path("/my data")


def test_two_homes_in_one_process_track_into_two_databases(tmp_path: Path) -> None:
    """What MLflow remembers of the first home does not reach the second."""
    first = resolve_storage(StorageConfig(home=str(tmp_path / "first")))
    tracking.prepare_tracking(first)
    second = resolve_storage(StorageConfig(home=str(tmp_path / "second")))

    assert second.tracking == f"sqlite:///{tmp_path}/second/mlflow.db"


def test_file_url_takes_a_name_as_it_is_but_for_percent_signs() -> None:
    """A question mark or number sign begins nothing in a folder's name."""
    assert local_path("file:///my?data#1%25") == Path("/my?data#1%")
    assert local_path("file:/data") == local_path("file://localhost/data") == Path("/data")


def test_file_url_of_another_machine_is_refused() -> None:
    """Two slashes where three belong would name another folder."""
    with pytest.raises(WrongInput, match="names a folder of the machine 'data': write file:///data/photos"):
        local_path("file://data/photos")
