"""Selection of the versions and files that maintenance keeps, by their names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.maintenance.retention import list_files, loadable_versions, versions_to_keep
from tasks.refs import TableRef


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
    (line,) = messages_of("lakevision.maintenance")
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
    assert messages_of("lakevision.maintenance")[0].startswith(
        f"a model was trained from version 3 of '{path}', which is not"
    )
    assert versions_to_keep(here, [TableRef(path=path, version=3, table_id="a")]) == [3]


@pytest.mark.parametrize(
    ("names", "loadable"),
    [
        (["00000000000000000000.json", "00000000000000000001.json", "00000000000000000001.crc"], {0, 1}),
        # A log after clean-up starts with a checkpoint.
        (["00000000000000000010.checkpoint.parquet", "00000000000000000011.json"], {10, 11}),
        # Commits before the checkpoint cannot be replayed.
        (["00000000000000000009.json", "00000000000000000010.checkpoint.parquet"], {10}),
        (["00000000000000000000.json", "00000000000000000002.json"], {0}),
        (["_last_checkpoint", "_unfinished-3-abc", "00000000000000000000.json.tmp"], set()),
    ],
)
def test_version_is_loadable_from_the_first_commit_or_a_checkpoint(names: list[str], loadable: set[int]) -> None:
    """A version is loadable if all commits since the first one or since a checkpoint exist."""
    assert loadable_versions(names) == loadable


def test_log_and_hidden_files_are_not_listed(tmp_path: Path) -> None:
    """Data files and change data are listed with size and modification time."""
    for name in (
        "part.parquet",
        "_delta_log/0.json",
        ".part.parquet.crc",
        "_change_data/cdc.parquet",
        "a/_b/c.parquet",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"four")
    os.utime(tmp_path / "part.parquet", (0, 0))
    found = {file.name: file for file in list_files(str(tmp_path))}
    assert set(found) == {"part.parquet", "_change_data/cdc.parquet"}
    assert found["part.parquet"].bytes == 4
    assert found["part.parquet"].modified_at.timestamp() == 0
