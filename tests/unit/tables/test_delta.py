"""Clean-up after a run that was killed while it created a table."""

from pathlib import Path

import pytest

from tasks.errors import WrongInput
from tasks.object_store import PROBE
from tasks.tables.delta import check_table_path, clear_uncommitted

PART = "part-00000-ca6d2c32-15d2-441f-859d-8b8f1bfc8df4-c000.zstd.parquet"


def write(folder: Path, *names: str) -> None:
    """Write empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize(
    ("names", "is_table", "left"),
    [
        (["_delta_log/.tmp"], False, []),
        (["_delta_log/_staged_commits/.tmp", PART, f".{PART}.crc"], False, []),
        (["_delta_log/.tmp", PART, "mine.parquet"], False, ["mine.parquet"]),
        (
            ["_delta_log/.tmp", f"a=1/{PART}", f"a=2/{PART}", "a=2/mine.parquet"],
            False,
            [f"a=2/{PART}", "a=2/mine.parquet"],
        ),
        ([f"_delta_log/{0:020}.json", PART], True, [f"_delta_log/{0:020}.json", PART]),
        ([f"_delta_log/{10:020}.checkpoint.parquet", PART], True, [f"_delta_log/{10:020}.checkpoint.parquet", PART]),
    ],
)
def test_table_without_a_commit_is_removed(tmp_path: Path, names, is_table, left) -> None:
    """Delta's files are removed if the log has no commits; a table with a commit keeps all files, and so do others."""
    table = tmp_path / "images"
    write(table, *names)

    assert check_table_path(str(table)) is is_table
    clear_uncommitted(str(table))

    assert sorted(path.relative_to(table).as_posix() for path in table.rglob("*") if path.is_file()) == sorted(left)


def test_files_of_the_log_that_the_caller_keeps_stay(tmp_path: Path) -> None:
    """Files in the log with the prefix stay; its other files and folders are removed, and data files as well."""
    table = tmp_path / "images"
    write(table, "_delta_log/kept-1", "_delta_log/.tmp", "_delta_log/_staged_commits/0.json", PART)

    clear_uncommitted(str(table), keep="kept-")

    assert [path.relative_to(table).as_posix() for path in table.rglob("*")] == ["_delta_log", "_delta_log/kept-1"]


def test_parquet_files_without_a_delta_log_are_refused_and_kept(tmp_path: Path) -> None:
    """Spark's Parquet files have the same names as Delta's, but without a log they are not touched."""
    write(tmp_path / "images", PART)
    with pytest.raises(WrongInput, match="is not a Delta table"):
        check_table_path(str(tmp_path / "images"))
    clear_uncommitted(str(tmp_path / "images"))
    assert (tmp_path / "images" / PART).exists()


def test_left_probe_does_not_make_a_folder_something_else_than_a_table(tmp_path: Path) -> None:
    """A run that is killed while it checks a location leaves an empty file, which the creation of the table removes."""
    probe = f"{PROBE}0123"
    write(tmp_path / "images", probe)
    assert not check_table_path(str(tmp_path / "images"))
    (tmp_path / "images" / "_delta_log").mkdir()
    clear_uncommitted(str(tmp_path / "images"))
    assert not (tmp_path / "images" / probe).exists()
