"""Where nothing can be written, and what is said of a full disk."""

from pathlib import Path

import pytest

from tasks.errors import DiskFull, WrongInput
from tasks.system.disk import NO_SPACE, check_writable, translate_disk_full
from tests.builders.processes import ROOT, plain_environment, run_python


def test_a_place_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    """Also where the folder is not there yet."""
    check_writable(str(tmp_path / "a" / "b"), "storage.tables")
    check_writable("s3a://bucket/tables", "storage.tables")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """With the setting and the system's reason."""
    (tmp_path / "file").touch()
    with pytest.raises(
        WrongInput, match=r"storage.tables is '.*file/tables', where nothing can be .* \(Not a directory"
    ):
        check_writable(f"{tmp_path}/file/tables", "storage.tables")


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    """Root, who may write anywhere, becomes somebody else for it."""
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


def test_a_full_disk_is_one_sentence_with_what_is_free(tmp_path: Path) -> None:
    """Whatever Spark wrapped around it; other failures are left alone."""
    with (
        pytest.raises(
            DiskFull, match=rf"a disk was full .*\('{tmp_path}/tables' has [\d.]+ MB free\): make room"
        ) as full,
        translate_disk_full(f"{tmp_path}/tables", "s3a://bucket/tables"),
    ):
        raise RuntimeError(f"Job aborted:\n java.io.IOException: {NO_SPACE[0]}\n and more")
    assert "\n" not in str(full.value)
    with pytest.raises(RuntimeError, match="another"), translate_disk_full(str(tmp_path)):
        raise RuntimeError("another")
