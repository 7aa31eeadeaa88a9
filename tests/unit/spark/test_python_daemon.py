"""The module search path of the daemon of Spark's Python workers."""

import sys
import zipfile
from pathlib import Path

import pytest

from tasks.spark.python_daemon import leave_out_archives


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder in which PySpark is installed, with its own archive."""
    library = tmp_path / "site-packages" / "pyspark" / "python" / "lib"
    library.mkdir(parents=True)
    (tmp_path / "site-packages" / "pyspark" / "__init__.py").touch()
    for archive in (library / "pyspark.zip", tmp_path / "own.zip"):
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("pyspark/__init__.py", "")
    return tmp_path / "site-packages"


def test_archives_of_the_installed_package_are_left_out(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other archives, folders and missing entries stay in their order."""
    archive, own = str(installed / "pyspark" / "python" / "lib" / "pyspark.zip"), str(installed.parent / "own.zip")
    monkeypatch.setitem(sys.path_importer_cache, archive, None)
    paths = [archive, "", own, str(installed), "/missing.zip"]

    leave_out_archives(paths)

    assert paths == ["", own, str(installed), "/missing.zip"]
    assert archive not in sys.path_importer_cache


def test_archive_of_another_spark_stays(installed: Path, tmp_path: Path) -> None:
    """An archive is left out only where the same PySpark is a folder: that of another Spark has another version."""
    archive, other = str(installed / "pyspark" / "python" / "lib" / "pyspark.zip"), str(tmp_path / "own.zip")
    without, with_other = [archive, str(tmp_path)], [other, str(installed)]

    leave_out_archives(without)
    leave_out_archives(with_other)

    assert without == [archive, str(tmp_path)]
    assert with_other == [other, str(installed)]
