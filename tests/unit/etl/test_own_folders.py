"""Folders that runs write to are never part of a source."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import SourceUnavailable, WrongInput
from tasks.etl.listing import list_images
from tasks.etl.own_folders import SYSTEM_FOLDERS, OwnFolders
from tasks.etl.source import prepare_source
from tasks.predict.source import list_source
from tasks.storage import Storage, resolve_storage

ARTIFACT = "1/0123456789abcdef/artifacts/confusion.png"
"""Path of a figure in a folder of artifacts."""


def put(folder: Path, *paths: str) -> None:
    """Write a file at each path below a folder."""
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"content")


def settings(home: Path, **locations: Path) -> Storage:
    """Return a storage with these locations."""
    return resolve_storage(StorageConfig(home=str(home), **{name: str(folder) for name, folder in locations.items()}))


def listed(source: Path, storage: Storage) -> list[str]:
    """Return the paths that ETL finds in a source."""
    listing = prepare_source(EtlConfig(source=str(source)), storage, SparkConfig()).listing
    return listing.table()["path"].to_pylist()


def predicted(source: Path, storage: Storage) -> list[str]:
    """Return the paths that inference finds in a source."""
    return list_source(str(source), storage.table("inputs"), storage, SparkConfig()).listing.table()["path"].to_pylist()


@pytest.mark.parametrize("home", ["home", "a/b/home", "cat/home", "."], ids=["top", "deep", "in a class", "the source"])
def test_home_inside_the_source_is_left_out_and_said(
    tmp_path: Path, home: str, messages_of, caplog: pytest.LogCaptureFixture
) -> None:
    """The figures of the first run are not read by the second, in any flow; the log says so."""
    caplog.set_level("INFO", "lakevision.etl")
    source = tmp_path / "source"
    put(source, "cat/1.jpg", "dog/1.jpg")
    put(source / home, f"artifacts/{ARTIFACT}", "digits/0/0000.png", "bench/1.png")
    storage = settings(source / home)

    assert listed(source, storage) == ["cat/1.jpg", "dog/1.jpg"]

    left_out = [line for line in messages_of("lakevision.etl") if "is left out of source" in line]
    assert left_out
    assert all(line.startswith(f"'{source / home}") and line.endswith("runs write to it") for line in left_out)
    assert predicted(source, storage) == ["cat/1.jpg", "dog/1.jpg"]
    assert any("is left out of predict.source" in line for line in messages_of("lakevision.etl"))


@pytest.mark.parametrize("name", ["artifacts", "cache", "tables"])
@pytest.mark.parametrize("is_link", [False, True])
def test_location_of_its_own_inside_the_source_is_left_out(tmp_path: Path, name: str, is_link: bool) -> None:
    """Each location may be a setting, also by a path with a symbolic link in it."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", "dog/1.jpg", f"out/{ARTIFACT}")
    place = source / "out"
    if is_link:
        place = tmp_path / "link" / "out"
        place.parent.symlink_to(source)

    assert listed(source, settings(tmp_path / "home", **{name: place})) == ["cat/1.jpg", "dog/1.jpg"]


def test_source_that_is_given_by_a_link_leaves_out_the_home_in_it(tmp_path: Path) -> None:
    """The paths of source and home are compared without symbolic links."""
    put(tmp_path / "source", "cat/1.jpg", "dog/1.jpg", f"home/artifacts/{ARTIFACT}")
    (tmp_path / "link").symlink_to(tmp_path / "source")

    assert listed(tmp_path / "link", settings(tmp_path / "source" / "home")) == ["cat/1.jpg", "dog/1.jpg"]


def test_bind_mount_of_the_home_is_left_out(tmp_path: Path) -> None:
    """A folder of the source with device and inode of the home is the home, whatever its path."""
    put(tmp_path, "cat/1.jpg", "dog/1.jpg", f"mounted/artifacts/{ARTIFACT}")
    status = (tmp_path / "mounted").stat()
    own = OwnFolders(str(tmp_path), "source", frozenset(), frozenset({(status.st_dev, status.st_ino)}))

    assert list_images(tmp_path, own=own).table()["path"].to_pylist() == ["cat/1.jpg", "dog/1.jpg"]


def test_link_to_a_file_of_the_home_is_left_out(tmp_path: Path) -> None:
    """A link in a class folder does not make a figure an image."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", "dog/1.jpg", f"home/artifacts/{ARTIFACT}")
    (source / "cat" / "figure.png").symlink_to(source / "home" / "artifacts" / ARTIFACT)

    assert listed(source, settings(source / "home")) == ["cat/1.jpg", "dog/1.jpg"]


def test_predictions_inside_a_folder_to_predict_are_left_out(tmp_path: Path) -> None:
    """Also the table `inputs` and the checkpoints of streams beside them."""
    source, storage = tmp_path / "source", settings(tmp_path / "home")
    put(source, "1.jpg", "out/predictions/2.jpg", "out/inputs/3.jpg", "out/predictions.streams/4.jpg", "out/5.jpg")
    own = OwnFolders.of(source, storage, "predict.source", str(source / "out" / "predictions"))

    found = list_source(str(source), storage.table("inputs"), storage, SparkConfig(), own=own)

    assert found.listing.table()["path"].to_pylist() == ["1.jpg", "out/5.jpg"]


@pytest.mark.parametrize("place", ["home/photos", "home/digits", "tables/photos", "artifacts/photos"])
def test_source_inside_a_location_is_a_source(tmp_path: Path, place: str) -> None:
    """Images that a user has put into the home, or beside tables or artifacts, are not the output of a run."""
    put(tmp_path / place, "cat/1.jpg", "dog/1.jpg")
    storage = settings(tmp_path / "home", tables=tmp_path / "tables", artifacts=tmp_path / "artifacts")

    assert listed(tmp_path / place, storage) == ["cat/1.jpg", "dog/1.jpg"]


def test_tables_beside_class_folders_are_left_out(tmp_path: Path) -> None:
    """With the source itself as the folder of the tables, only the tables are left out."""
    put(tmp_path / "source", "cat/1.jpg", "dog/1.jpg", "images/2.jpg", "files/3.jpg", "predictions/4.jpg")

    found = listed(tmp_path / "source", settings(tmp_path / "home", tables=tmp_path / "source"))

    assert found == ["cat/1.jpg", "dog/1.jpg"]


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [(errno.EACCES, WrongInput, "change its permissions"), (errno.EIO, SourceUnavailable, "check the disk")],
)
def test_location_that_cannot_be_looked_at_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], advice: str
) -> None:
    """A location behind a closed folder, or on a share that fails, is one sentence as everywhere."""
    put(tmp_path / "source", "cat/1.jpg")
    place, stat = tmp_path / "closed" / "artifacts", os.stat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(place):
            raise OSError(number, os.strerror(number))
        return stat(path, **options)

    storage = settings(tmp_path / "home", artifacts=place)
    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(
        kind, match=rf"^storage has '{place}', which cannot be read \({os.strerror(number)}\): {advice}"
    ):
        OwnFolders.of(tmp_path / "source", storage)


@pytest.mark.parametrize("source", ["home/artifacts", "home/artifacts/1", "elsewhere"])
def test_artifacts_are_no_source(tmp_path: Path, source: str) -> None:
    """They cannot be left out of themselves: the message names them and both settings."""
    put(tmp_path / source, "cat/1.jpg", "dog/1.jpg")
    storage = settings(tmp_path / "home", **({"artifacts": tmp_path / source} if source == "elsewhere" else {}))

    with pytest.raises(WrongInput, match=rf"'.*/{source}', which has the artifacts") as refused:
        listed(tmp_path / source, storage)
    assert refused.value.setting == "source"


@pytest.mark.parametrize("artifacts", ["s3://bucket/photos/out", "s3a://bucket/photos/out/", "S3N://bucket/photos/out"])
def test_locations_below_a_url_are_left_out(
    tmp_path: Path, artifacts: str, messages_of, caplog: pytest.LogCaptureFixture
) -> None:
    """The schemes of S3 name the same store; a name that only begins alike is another folder."""
    caplog.set_level("INFO", "lakevision.etl")
    storage = resolve_storage(StorageConfig(home=str(tmp_path), artifacts=artifacts, tables="s3a://bucket/photos/t"))
    own = OwnFolders.of("s3a://bucket/photos", storage)

    prefixes = own.prefixes()

    assert "out/" in prefixes
    assert "t/" in prefixes
    assert own.has_path(f"out/{ARTIFACT}", prefixes)
    assert own.has_path(f"out/{ARTIFACT}", prefixes)
    assert not own.has_path("outside/1.jpg", prefixes)
    assert not own.has_path("cat/out/1.jpg", prefixes)
    assert messages_of("lakevision.etl") == [
        "'s3a://bucket/photos/out' is left out of source 's3a://bucket/photos': runs write to it"
    ]


SYSTEM_FILES = (
    *("cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_XL.jpg", "@eaDir/2.jpg", "#recycle/cat/3.jpg", "@Recycle/4.jpg"),
    *("$RECYCLE.BIN/S-1-5/5.jpg", "$Recycle.Bin/6.jpg", "System Volume Information/7.jpg", "__MACOSX/cat/8.jpg"),
)
LIKE_SYSTEM = ("lost+found.jpg", "recycle/1.jpg", "the @eaDir/1.jpg", "@eaDirs/1.jpg")


def test_system_folders_are_left_out_and_said_once(
    tmp_path: Path, messages_of, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be classes of their own, and a folder that only the administrator may read would refuse the source."""
    caplog.set_level("INFO", "lakevision.etl")
    source, storage = tmp_path / "#recycle" / "source", settings(tmp_path / "home")
    put(source, "cat/1.jpg", "dog/1.jpg", *SYSTEM_FILES, *LIKE_SYSTEM)
    (source / "lost+found").mkdir(mode=0o000)
    (source / "cat" / "link.jpg").symlink_to(source / SYSTEM_FILES[0])

    assert listed(source, storage) == sorted(["cat/1.jpg", "dog/1.jpg", *LIKE_SYSTEM])
    assert predicted(source, storage) == sorted(["cat/1.jpg", "dog/1.jpg", *LIKE_SYSTEM])
    said = [line for line in messages_of("lakevision.etl") if "devices and operating systems make them" in line]
    names = {*SYSTEM_FOLDERS} - {"#snapshot", "@Recently-Snapshot"}
    assert len(said) == 2 * len(names)  # of ETL and inference
    assert f"'{source}/lost+found' is left out, like each folder of this name" in str(said)


def test_system_folders_of_a_store_are_left_out(tmp_path: Path) -> None:
    """Its listing has paths without folders."""
    own = OwnFolders.of("s3a://bucket/@eaDir/images", settings(tmp_path / "home"))

    assert all(own.has_path(path, own.prefixes()) for path in SYSTEM_FILES)
    assert not any(own.has_path(path, own.prefixes()) for path in ("cat/1.jpg", *LIKE_SYSTEM))
