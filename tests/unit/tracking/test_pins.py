"""Pins in a table's folder, and the table versions that models need."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.errors import WrongInput
from tasks.object_store import file_system
from tasks.refs import TableRef
from tasks.tracking.pins import ServerPins, read_pins, release_pins, versions_to_keep, write_pins
from tests.builders.processes import ROOT

A, B = "a" * 16, "b" * 16


@pytest.fixture(params=["folder", "store"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the location of a table in a folder or a store, where nothing is yet."""
    return str(tmp_path / "tables" / "images") if request.param == "folder" else f"memory://{uuid4().hex}/images"


def test_pins_of_each_server_are_added_and_released_alone(table: str) -> None:
    """A server adds versions to its own, also those that it has, and a new URI of it replaces the old one."""
    assert read_pins(table) == {}
    write_pins(table, A, "sqlite:////old/mlflow.db", [3, 12])
    write_pins(table, B, "http://mlflow:5000", [])
    write_pins(table, A, "sqlite:////new/mlflow.db", [12, 4], is_checked=True)
    assert read_pins(table) == {
        A: ServerPins("sqlite:////new/mlflow.db", frozenset({3, 4, 12}), is_checked=True),
        B: ServerPins("http://mlflow:5000", frozenset()),
    }
    write_pins(table, B, "http://mlflow:5000", [3])
    release_pins(table, A, [3, 12])
    assert read_pins(table) == {
        A: ServerPins("sqlite:////new/mlflow.db", frozenset({4}), is_checked=True),
        B: ServerPins("http://mlflow:5000", frozenset({3})),
    }


def test_existing_pins_are_not_written_again(tmp_path: Path) -> None:
    """A promotion that changes nothing writes nothing."""
    table = str(tmp_path / "images")
    write_pins(table, A, "sqlite:////mlflow.db", [1])
    files = [tmp_path / "images" / "_pins" / A / name for name in ("server", "1")]
    for file in files:
        os.utime(file, (0, 0))
    write_pins(table, A, "sqlite:////mlflow.db", [1])
    assert [file.stat().st_mtime for file in files] == [0, 0]


def test_pins_of_a_killed_writer_count(table: str) -> None:
    """Its file is empty, or the name of its server is missing: the version is pinned all the same."""
    filesystem, root = file_system(table)
    filesystem.makedirs(f"{root}/_pins/{A}")
    write_pins(table, B, "", [])
    filesystem.rm_file(f"{root}/_pins/{B}/server")
    filesystem.pipe_file(f"{root}/_pins/{B}/5", b"")
    found = read_pins(table)
    assert found[B] == ServerPins("unknown", frozenset({5}))
    assert found.get(A) in (ServerPins("unknown", frozenset()), None)  # a store has no empty folders


@pytest.mark.parametrize("odd", ["c", f"{A}/server.old", f"{A}/3.json", f"{A}/-1"])
def test_files_that_are_no_pins_are_an_error(table: str, odd: str) -> None:
    """The versions that models need are not known then."""
    write_pins(table, A, "sqlite:////mlflow.db", [1])
    filesystem, root = file_system(table)
    filesystem.pipe_file(f"{root}/_pins/{odd}", b"")
    with pytest.raises(WrongInput, match=f"'{table}/_pins/{odd}' is not a pin"):
        read_pins(table)


def test_pins_that_cannot_be_read_or_written_are_one_sentence(tmp_path: Path) -> None:
    """Not an empty list, which a clean-up would take for a table that no model needs."""
    table = tmp_path / "images"
    (table / "_pins").mkdir(parents=True)
    (table / "_pins" / A).write_text("a file in place of a folder")
    with pytest.raises(WrongInput, match=f"'{table}/_pins', .*written .*FileExistsError"):
        write_pins(str(table), A, "sqlite:////mlflow.db", [1])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without the right to read")
def test_folder_without_permission_is_not_an_empty_one(tmp_path: Path) -> None:
    """Another user's pins are not ignored."""
    table = tmp_path / "images"
    write_pins(str(table), A, "sqlite:////mlflow.db", [1])
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tasks.errors import WrongInput
from tasks.tracking.pins import read_pins
os.chmod({str(table / "_pins" / A)!r}, 0o700)
os.setuid(65534)
try:
    print(read_pins({str(table)!r}))
except WrongInput as error:
    print(error)
"""
    for folder in (table, *table.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "cannot be read (PermissionError" in done.stdout, done.stdout + done.stderr


def test_table_is_matched_by_id_independent_of_its_path(tmp_path: Path) -> None:
    """Versions of a table at the same path with another id are ignored, since it is another table."""
    here = TableRef(path=str(tmp_path / "images"), version=9, table_id="a")
    trained = [
        TableRef(path="/moved/from/images", version=3, table_id="a"),
        TableRef(path=here.path, version=1, table_id="a"),
        TableRef(path=here.path, version=5, table_id="of the table that was here before"),
    ]
    assert versions_to_keep(here, trained) == [1, 3]


def test_table_without_an_id_is_matched_by_resolved_path_or_name(tmp_path: Path) -> None:
    """Older runs logged no id: symbolic links and trailing slashes are resolved.

    A table of the same name at another path may be this one before a move, so its version is kept.
    """
    (tmp_path / "tables" / "images").mkdir(parents=True)
    (tmp_path / "elsewhere" / "images").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "tables")
    here = TableRef(path=str(tmp_path / "tables" / "images"), version=9, table_id="a")
    trained = [
        TableRef(path=str(tmp_path / "link" / "images"), version=2),
        TableRef(path=f"file://{here.path}/", version=4),
        TableRef(path=str(tmp_path / "elsewhere" / "images"), version=6),
        TableRef(path=str(tmp_path / "elsewhere" / "photos"), version=8),
    ]
    assert versions_to_keep(here, trained) == [2, 4, 6]
    store = TableRef(path="s3a://bucket/images", version=9)
    assert versions_to_keep(store, [TableRef(path="s3a://bucket/images/", version=7)]) == [7]


@pytest.mark.parametrize("used_again", [False, True])
def test_version_of_a_moved_table_without_an_id_is_kept(
    tmp_path: Path, messages_of: Callable[[str], list[str]], used_again: bool
) -> None:
    """The version is kept with a warning, also if another table is at the old path now; other names do not match."""
    here = TableRef(path=str(tmp_path / "home" / "images"), version=9, table_id="a")
    old = tmp_path / "old home" / "images"
    if used_again:
        old.mkdir(parents=True)
    trained = [
        TableRef(path=str(old), version=2),
        TableRef(path=str(tmp_path / "old home" / "files"), version=4),
    ]
    assert versions_to_keep(here, trained) == [2]
    (line,) = messages_of("lakevision.tracking")
    assert "which has no table id: kept as version 2" in line


@pytest.mark.parametrize(
    ("path", "kept"), [("file://nas/images", [3]), ("//[x", []), ("file://nas/photos", []), ("a\0b", [])]
)
def test_invalid_path_in_the_registry_gives_a_warning(
    tmp_path: Path, messages_of: Callable[[str], list[str]], path: str, kept: list[int]
) -> None:
    """Any user can edit a model's tags: the warning has path and version, and other models still count."""
    here = TableRef(path=str(tmp_path / "images"), version=9, table_id="a")
    trained = [TableRef(path=path, version=3), TableRef(path=here.path, version=5)]
    assert versions_to_keep(here, trained) == [*kept, 5]
    assert messages_of("lakevision.tracking")[0].startswith(
        f"a model was trained from version 3 of '{path}', which is not"
    )
    assert versions_to_keep(here, [TableRef(path=path, version=3, table_id="a")]) == [3]
