"""Build backend (PEP 517) of petastorm 0.13.1 for today's Python, NumPy and PyArrow: its last wheel, patched.

petastorm has no source distribution. Its pure wheel is downloaded, unpacked, patched, and packed again.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
VERSION = "0.13.1"
SHA256 = "7d073f01f65ba6b50e05fae8254d0f469881bcaf41ead2028e676517c45bbd1b"
"""Digest of the wheel on PyPI."""

PATCHES = (
    # What PyArrow 15 and 16 removed: file systems, and datasets with pieces and partitions.
    ("**/*.py", "from pyarrow import parquet as pq", "from petastorm import legacy_parquet as pq"),
    ("petastorm/tests/*.py", "import pyarrow.parquet as pq", "from petastorm import legacy_parquet as pq"),
    ("**/*.py", "from pyarrow.filesystem import", "from petastorm.legacy_parquet import"),
    ("**/*.py", "from pyarrow.lib import ArrowIOError\n", ""),
    ("**/*.py", "ArrowIOError", "OSError"),
    ("petastorm/fs_utils.py", "import pyarrow\n", "from petastorm.legacy_parquet import LocalFileSystem\n"),
    ("petastorm/fs_utils.py", "pyarrow.localfs", "LocalFileSystem()"),
    ("petastorm/utils.py", "import pyarrow\n", "import pyarrow.parquet\n"),
    (
        "petastorm/spark/spark_dataset_converter.py",
        "from pyarrow import LocalFileSystem",
        "from petastorm.legacy_parquet import LocalFileSystem",
    ),
    ("petastorm/hdfs/namenode.py", "from pyarrow.hdfs import", "from petastorm.legacy_parquet import"),
    ("petastorm/hdfs/namenode.py", "pyarrow.hdfs.connect(hostname", "HadoopFileSystem(hostname"),
    # fsspec returns one instance for equal arguments: a client that has failed over would be shared.
    (
        "petastorm/hdfs/namenode.py",
        "class HAHdfsClient(HadoopFileSystem):\n",
        "class HAHdfsClient(HadoopFileSystem):\n    cachable = False\n\n",
    ),
    # fsspec's class has a cached property, which is not a method.
    (
        "petastorm/hdfs/namenode.py",
        "            if not name.startswith('_'):\n",
        "            if not name.startswith('_') and callable(method):\n",
    ),
    # What Python 3.12 removed.
    ("**/*.py", "from distutils.version import LooseVersion", "from packaging.version import parse as LooseVersion"),
    # `future` is for Python 2: Python 3 chains exceptions by itself.
    ("petastorm/utils.py", "from future.utils import raise_with_traceback\n", ""),
    (
        "petastorm/utils.py",
        "raise_with_traceback(DecodeFieldError('Decoding field \"{}\" failed'.format(field_name)))",
        "raise DecodeFieldError('Decoding field \"{}\" failed'.format(field_name))",
    ),
    # What NumPy 1.24 and 2 removed, also in petastorm's own tests.
    ("**/*.py", "np.unicode_", "np.str_"),
    ("**/*.py", "np.string_", "np.bytes_"),
    ("**/*.py", "np.float)", "float)"),
    ("petastorm/predicates.py", "np.in1d(", "np.isin("),
    # What petastorm's own tests use of the above, and of pandas.
    (
        "petastorm/tests/test_end_to_end.py",
        "import pyarrow.hdfs\n",
        "from petastorm.legacy_parquet import LocalFileSystem\n",
    ),
    ("petastorm/tests/test_end_to_end.py", "pyarrow.LocalFileSystem", "LocalFileSystem"),
    (
        "petastorm/tests/test_dataset_metadata.py",
        "import pyarrow\n",
        "from petastorm.legacy_parquet import LocalFileSystem\n",
    ),
    ("petastorm/tests/test_dataset_metadata.py", "pyarrow.LocalFileSystem", "LocalFileSystem"),
    ("petastorm/tests/test_arrow_table_serializer.py", "pandas.util.testing", "pandas.testing"),
    # A hook of the plugin pytest-logger, without which pytest refuses petastorm's own tests.
    (
        "petastorm/tests/conftest.py",
        "def pytest_logger_config(",
        "@pytest.hookimpl(optionalhook=True)\ndef pytest_logger_config(",
    ),
    # The metadata: `future` is no longer used, and nothing needs `pkg_resources` of old setuptools.
    ("*.dist-info/METADATA", "Requires-Dist: future>=0.10.2\n", ""),
    ("*.dist-info/METADATA", "Requires-Dist: setuptools<70\n", ""),
)
"""Files as a pattern, text to replace, and its replacement. After a change, increment the version in pyproject.toml."""


def patch(folder: Path, version: str) -> None:
    """Patch an unpacked wheel, and name its version.

    Raises:
        SystemExit: No file has the text that is replaced.
    """
    named = ("*.dist-info/METADATA", f"\nVersion: {VERSION}\n", f"\nVersion: {version}\n")
    for pattern, old, new in (*PATCHES, named):
        texts = {file: text for file in folder.glob(pattern) if old in (text := file.read_text())}
        if not texts:
            raise SystemExit(f"patch_petastorm: no file of '{pattern}' has '{old}': adapt PATCHES to this petastorm")
        for file, text in texts.items():
            file.write_text(text.replace(old, new))
    shutil.copy(FOLDER / "legacy_parquet.py", folder / "petastorm")
    metadata = next(folder.glob("*.dist-info"))
    metadata.rename(folder / f"petastorm-{version}.dist-info")


def build_wheel(wheel_directory: str, _config_settings: object = None, _metadata_directory: object = None) -> str:
    """Build the patched wheel, and return its file name."""
    version = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"petastorm=={VERSION} --hash=sha256:{SHA256}\n")
        _run(
            "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", requirements, "-d", folder
        )
        (original,) = folder.glob("*.whl")
        shutil.unpack_archive(original, folder / "wheel", "zip")
        patch(folder / "wheel", version)
        # Packing writes the digests of all files anew.
        _run("wheel", "pack", folder / "wheel", "--dest-dir", wheel_directory)
    return next(Path(wheel_directory).glob("petastorm-*.whl")).name


def _run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", *map(str, arguments)], check=True)
