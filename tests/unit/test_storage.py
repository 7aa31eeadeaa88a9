"""Storage locations of a run, and local paths of URLs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.model.pretrained import load_weights
from tasks.paths import local_path
from tasks.storage import resolve_storage
from tasks.tracking.server import prepare_tracking


def test_all_locations_are_under_the_home_by_default(tmp_path: Path) -> None:
    """With only the home set, all other locations are under it."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))

    assert storage.home == str(tmp_path)
    assert storage.tables == f"{tmp_path}/tables"
    assert storage.cache == f"{tmp_path}/cache"
    assert storage.artifacts == f"{tmp_path}/artifacts"
    assert storage.tracking == f"sqlite:///{tmp_path}/mlflow.db"
    assert storage.logs == tmp_path / "logs"
    assert storage.checkpoints == tmp_path / "checkpoints"


def test_home_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home is $LAKEVISION_HOME, and a setting takes precedence over it."""
    monkeypatch.setenv("LAKEVISION_HOME", str(tmp_path / "environment"))

    assert resolve_storage(StorageConfig()).home == str(tmp_path / "environment")
    assert resolve_storage(StorageConfig(home=str(tmp_path / "setting"))).home == str(tmp_path / "setting")


def test_artifacts_location_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is $LAKEVISION_ARTIFACTS, a setting takes precedence over it, and a password in it is refused."""
    monkeypatch.setenv("LAKEVISION_ARTIFACTS", "s3://bucket/artifacts")
    assert resolve_storage(StorageConfig(home=str(tmp_path))).artifacts == "s3://bucket/artifacts"
    assert resolve_storage(StorageConfig(home=str(tmp_path), artifacts="s3://other")).artifacts == "s3://other"

    monkeypatch.setenv("LAKEVISION_ARTIFACTS", "s3://key:hunter2@bucket/artifacts")
    with pytest.raises(WrongInput, match="LAKEVISION_ARTIFACTS is not accepted: it is a URL with a user") as refused:
        resolve_storage(StorageConfig(home=str(tmp_path)))
    assert "hunter2" not in str(refused.value)


def test_home_is_in_the_current_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default home is the absolute path of ./.lakevision, and resolving it does not create it."""
    monkeypatch.delenv("LAKEVISION_HOME", raising=False)
    monkeypatch.chdir(tmp_path)

    assert resolve_storage(StorageConfig()).home == str(tmp_path / ".lakevision")
    assert list(tmp_path.iterdir()) == []


def test_relative_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder becomes absolute, so that a worker in another folder uses the same one, and ~ is expanded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    storage = resolve_storage(StorageConfig(home="home", tables="./tables", cache="~/cache"))

    assert storage.home == str(tmp_path / "home")
    assert storage.tables == str(tmp_path / "tables")
    assert storage.cache == "/home/someone/cache"
    assert storage.artifacts == str(tmp_path / "home" / "artifacts")


@pytest.mark.parametrize("name", ["photos-tables", "photos.2", "größe 中"])
def test_name_for_the_tables_is_a_folder_in_the_home(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment can preset another folder for its tables without knowing the home."""
    monkeypatch.chdir("/")

    assert resolve_storage(StorageConfig(home=str(tmp_path), tables=name)).tables == f"{tmp_path}/{name}"


@pytest.mark.parametrize(
    ("given", "tables"),
    [("/a", "/a"), ("a/b", "/work/a/b"), (".", "/work"), ("..", "/work/.."), ("~", "/home/me"), ("s3a://b", "s3a://b")],
)
def test_other_path_for_the_tables_is_outside_the_home(
    given: str, tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path with a slash, a dot or a tilde is absolute or relative to the current folder, as for other locations."""
    monkeypatch.setattr(os, "getcwd", lambda: "/work")
    monkeypatch.setenv("HOME", "/home/me")

    assert resolve_storage(StorageConfig(home="/h", tables=given)).tables == tables


def test_urls_are_unchanged(tmp_path: Path) -> None:
    """URLs of object stores and servers are kept as given."""
    storage = resolve_storage(
        StorageConfig(
            home=str(tmp_path), tables="s3a://bucket/tables", cache="gs://bucket/cache", tracking="http://mlflow:5000"
        )
    )

    assert (storage.tables, storage.cache) == ("s3a://bucket/tables", "gs://bucket/cache")
    assert storage.tracking == "http://mlflow:5000"


def test_table_is_a_folder_in_tables() -> None:
    """The URL of a table is a folder in `tables`, with or without a trailing slash."""
    for tables in ("s3a://bucket/tables", "s3a://bucket/tables/"):
        storage = resolve_storage(StorageConfig(home="/home", tables=tables))
        assert storage.table("images") == "s3a://bucket/tables/images"


def test_storage_resolves_to_itself_on_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that is passed to a worker resolves identically in another folder and environment."""
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
def test_local_path_of_a_folder_or_file_url(url: str, path: Path | None) -> None:
    """A folder or file:// URL has a local path, and an object store has None."""
    assert local_path(url) == path


def test_file_url_is_unescaped() -> None:
    """%20 in a file:// URL is a space in the path."""
    assert local_path("file:///my%20data") == Path("/my data")


def test_two_homes_in_one_process_track_into_two_databases(tmp_path: Path) -> None:
    """MLflow's tracking URI of the first home does not affect the second."""
    first = resolve_storage(StorageConfig(home=str(tmp_path / "first")))
    prepare_tracking(first)
    second = resolve_storage(StorageConfig(home=str(tmp_path / "second")))

    assert second.tracking == f"sqlite:///{tmp_path}/second/mlflow.db"


def test_file_url_has_neither_query_nor_fragment() -> None:
    """A question mark or number sign in a file:// URL is part of the folder's name."""
    assert local_path("file:///my?data#1%25") == Path("/my?data#1%")
    assert local_path("file:/data") == local_path("file://localhost/data") == Path("/data")


@pytest.mark.parametrize(
    "call", [lambda url: resolve_storage(StorageConfig(home=url)), lambda url: load_weights("resnet18", url)]
)
def test_home_of_an_unknown_user_is_refused(call: Callable[[str], object]) -> None:
    """In a setting of the storage and in a path of a file."""
    with pytest.raises(
        WrongInput, match=r"^'~nobody-of-this-name/x' is in the home of the user 'nobody-of-this-name', "
    ):
        call("~nobody-of-this-name/x")


def test_file_url_of_another_machine_is_refused() -> None:
    """A file:// URL with two slashes instead of three is refused."""
    with pytest.raises(WrongInput, match="names a folder of the machine 'data': write file:///data/photos"):
        local_path("file://data/photos")
