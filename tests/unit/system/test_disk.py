"""Checks for write access, and the error of a full disk."""

from pathlib import Path

import pytest

from tasks.errors import DiskFull, WrongInput
from tasks.system.disk import NO_SPACE, check_writable, translate_disk_full
from tests.builders.processes import ROOT, plain_environment, run_python


def test_writable_location_is_unchanged_by_the_check(tmp_path: Path) -> None:
    """The check leaves no file behind and creates no folder."""
    check_writable(str(tmp_path / "a" / "b"), "storage.tables")
    assert list(tmp_path.iterdir()) == []


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    """The error names the setting, the location and the system's reason."""
    (tmp_path / "file").touch()
    with pytest.raises(WrongInput, match=r"'.*file/tables', .* \(Not a directory") as refused:
        check_writable(f"{tmp_path}/file/tables", "storage.tables")
    assert refused.value.setting == "storage.tables"


def test_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    """A read-only folder is refused; root, which may write anywhere, switches to another user for the test."""
    folder = tmp_path / "mine"
    folder.mkdir()
    program = f"""
import os, sys
os.chdir({str(folder)!r})
sys.path.insert(0, {str(ROOT)!r})
from tasks.system.disk import check_writable
os.chmod(".", 0o555)
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
check_writable(".", "storage.home")
"""
    done = run_python("-c", program, environment=plain_environment(), timeout=120)
    assert "WrongInput: storage.home is '.', where nothing can be written (Permission denied)" in done.stderr


def test_full_disk_is_reported_with_the_free_space(tmp_path: Path) -> None:
    """An error of a full disk becomes one line, even if Spark wrapped it; other errors pass unchanged."""
    with (
        pytest.raises(DiskFull, match=rf"'{tmp_path}/tables' has [\d.]+ MB free") as full,
        translate_disk_full(f"{tmp_path}/tables", "s3a://bucket/tables"),
    ):
        raise RuntimeError(f"Job aborted:\n java.io.IOException: {NO_SPACE[0]}\n and more")
    assert "\n" not in str(full.value)
    with pytest.raises(RuntimeError, match="another"), translate_disk_full(str(tmp_path)):
        raise RuntimeError("another")
    with pytest.raises(WithoutText), translate_disk_full(str(tmp_path)):
        raise WithoutText


class WithoutText(Exception):
    """An error like those of py4j, whose text is asked from a JVM that is gone."""

    def __str__(self) -> str:
        raise ConnectionRefusedError
