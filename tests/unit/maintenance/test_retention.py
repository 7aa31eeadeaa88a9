"""Selection of the files that maintenance keeps, by their names."""

import os
from pathlib import Path

import pytest

from tasks.maintenance.maintain import list_files, loadable_versions


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
