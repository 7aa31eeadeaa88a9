"""The patches of petastorm, and its module in place of PyArrow's removed API, as set-up has installed them."""

import copy
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from petastorm import make_batch_reader
from petastorm.etl.dataset_metadata import load_row_groups
from petastorm.hdfs.namenode import HAHdfsClient
from petastorm.legacy_parquet import ParquetDataset
from pyarrow.fs import LocalFileSystem

from deployments.setup.patched_petastorm import patch_petastorm

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deployments" / "setup" / "patched_petastorm"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]


def test_patched_release_is_locked_and_installed() -> None:
    """`uv sync` leaves the patched one as it is: the lock names its folder, and the project the release."""
    (locked,) = (
        package
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
        if package["name"] == "petastorm"
    )
    assert locked["source"] == {"directory": "deployments/setup/patched_petastorm"}
    assert version("petastorm") == locked["version"] == PROJECT["version"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"petastorm=={patch_petastorm.VERSION}" in ours


def test_requirements_are_those_of_the_patched_wheel() -> None:
    """Uv reads them in pyproject.toml, without building the wheel."""
    names = sorted(line for line in requires("petastorm") or [] if "extra ==" not in line)
    assert names == sorted(PROJECT["dependencies"])


@pytest.mark.parametrize("number", range(len(patch_petastorm.PATCHES)))
def test_patch_that_finds_no_text_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the file and the text; the others are not needed for it."""
    pattern, old, _new = patch_petastorm.PATCHES[number]
    file = tmp_path / pattern.replace("**/*", "petastorm/any").replace("*", "any")
    file.parent.mkdir(parents=True)
    file.write_text("nothing")
    monkeypatch.setattr(patch_petastorm, "PATCHES", (patch_petastorm.PATCHES[number],))
    with pytest.raises(SystemExit) as refused:
        patch_petastorm.patch(tmp_path, "1")
    assert pattern in str(refused.value)
    assert old in str(refused.value)
    assert file.read_text() == "nothing"


@pytest.fixture
def partitioned(tmp_path: Path) -> Path:
    """Write rows in folders of two levels, and what a reader must leave alone."""
    rows = pa.table(
        {"id": range(24), "colour": ["red", "green"] * 12, "size": [2, 10, 10] * 8, "text": map(str, range(24))}
    )
    folder = tmp_path / "a b%20"
    pa.dataset.write_dataset(
        rows, folder, format="parquet", partitioning=["colour", "size"], partitioning_flavor="hive"
    )
    (folder / "_SUCCESS").touch()
    (folder / ".hidden").touch()
    return folder


@pytest.mark.parametrize("filesystem", [None, LocalFileSystem()])
def test_partitions_are_columns_of_all_pieces(partitioned: Path, filesystem: object) -> None:
    """Values are read from the folders' names; the columns are in the file's order, whatever the set's."""
    dataset = ParquetDataset(str(partitioned), filesystem)
    assert [(level.name, level.dictionary.to_pylist()) for level in dataset.partitions] == [
        ("colour", ["green", "red"]),
        ("size", [2, 10]),
    ]
    assert dataset.partitions.partition_names == {"colour", "size"}
    tables = [piece.read({"text", "id"}, dataset.partitions) for piece in load_row_groups(dataset)]
    assert len(tables) == 4
    read = pa.concat_tables(tables).to_pylist()
    assert list(read[0]) == ["id", "text", "colour", "size"]
    assert sorted((row["id"], row["colour"], row["size"]) for row in read) == [
        (number, ["red", "green"][number % 2], [2, 10, 10][number % 3]) for number in range(24)
    ]


def test_filters_select_folders(partitioned: Path) -> None:
    """Petastorm's reader passes them on; pieces can be copied, as for Spark's executors."""
    dataset = ParquetDataset(str(partitioned), filters=[("colour", "=", "red"), ("size", ">", 2)])
    (piece,) = copy.deepcopy(dataset.pieces)
    assert piece.get_metadata().num_rows == 8
    with make_batch_reader(
        partitioned.as_uri().replace("%20", " ").replace("%25", "%"),
        filters=[("colour", "=", "red")],
        reader_pool_type="dummy",
        num_epochs=1,
    ) as reader:
        assert {colour for batch in reader for colour in batch.colour} == {"red"}


def test_summary_files_are_found(tmp_path: Path) -> None:
    """`_common_metadata` has the schema's metadata; without it, `_metadata` has."""
    table = pa.table({"id": [1]}).replace_schema_metadata({"who": "a test"})
    pq.write_table(table, tmp_path / "part.parquet")
    assert ParquetDataset(str(tmp_path)).common_metadata is None
    pq.write_metadata(table.schema, tmp_path / "_metadata")
    assert ParquetDataset(str(tmp_path)).common_metadata.metadata[b"who"] == b"a test"
    pq.write_metadata(table.schema.with_metadata({"who": "common"}), tmp_path / "_common_metadata")
    dataset = ParquetDataset(str(tmp_path))
    assert (dataset.metadata.metadata[b"who"], dataset.common_metadata.metadata[b"who"]) == (b"a test", b"common")
    assert [Path(piece.path).name for piece in dataset.pieces] == ["part.parquet"]


def test_missing_file_of_a_list_is_refused(tmp_path: Path) -> None:
    """A list of files is not looked for in folders."""
    pq.write_table(pa.table({"id": [1]}), tmp_path / "1.parquet")
    with pytest.raises(OSError, match=r"2\.parquet' is neither a folder nor a file"):
        ParquetDataset([str(tmp_path / f"{number}.parquet") for number in (1, 2)])


def test_clients_of_name_nodes_are_not_shared() -> None:
    """Otherwise fsspec returns the same instance for equal arguments."""

    class Connector:
        """Connector that counts its connections."""

        count = 0

        @classmethod
        def _try_next_namenode(cls, index: int, _nodes: list[str], **_options: object) -> tuple[int, str]:
            cls.count += 1
            return index + 1, "connection"

    first, second = (HAHdfsClient(Connector, ["a", "b"]) for _ in range(2))
    assert first is not second
    assert Connector.count == 2
