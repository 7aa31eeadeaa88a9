"""Sources: a path, a file:// URL, or the URL of another file system."""

from pathlib import Path

import pytest

from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl.source import find_source, prepare_source, relist_if_outdated
from tasks.storage import Storage, resolve_storage
from tests.conftest import write_images


def storage_below(home: Path) -> Storage:
    """Return a storage with everything below one folder."""
    return Storage(home=str(home), tables="", cache="", artifacts="", tracking="")


def test_builtin_digits_are_below_the_home(tmp_path: Path) -> None:
    """The built-in data set is in the folder `digits` of the home."""
    assert find_source(BUILTIN_DIGITS, storage_below(tmp_path)) == tmp_path / "digits"


def test_file_url_and_path_name_the_same_folder(tmp_path: Path) -> None:
    """A file:// URL and a path give the same local folder."""
    assert find_source(f"file://{tmp_path}", storage_below(tmp_path)) == tmp_path
    assert find_source(str(tmp_path), storage_below(tmp_path)) == tmp_path


def test_relative_source_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path becomes absolute, since executors run in other folders."""
    monkeypatch.chdir(tmp_path)

    assert find_source("images", storage_below(tmp_path)) == tmp_path / "images"


@pytest.mark.parametrize("url", ["s3a://bucket/my photos", "hdfs://host:8020/photos", "gs://bucket"])
def test_url_is_kept_as_text_without_a_slash_at_the_end(tmp_path: Path, url: str) -> None:
    """A URL with and without a trailing slash is the same source."""
    assert find_source(url, storage_below(tmp_path)) == url
    assert find_source(f"{url}/", storage_below(tmp_path)) == url


def test_source_that_is_neither_path_nor_url_is_refused(tmp_path: Path) -> None:
    """The message has the path to give for a folder whose name looks like a scheme."""
    with pytest.raises(WrongInput, match=r"'cats:2024'.*\(\./cats:2024") as refused:
        find_source("cats:2024", storage_below(tmp_path))
    assert refused.value.setting == "source"


def test_local_source_is_listed_without_spark(tmp_path: Path) -> None:
    """A local source is listed without Spark, also from a file:// URL with escaped characters."""
    for label in ("cat", "dog"):
        (tmp_path / "my photos=50% ä" / label).mkdir(parents=True)
        (tmp_path / "my photos=50% ä" / label / "1.jpg").write_bytes(b"x")

    source = prepare_source(
        EtlConfig(source=f"file://{tmp_path}/my%20photos=50%25%20%C3%A4"), storage_below(tmp_path), SparkConfig()
    )

    assert source.location == tmp_path / "my photos=50% ä"
    assert source.listing.table()["path"].to_pylist() == ["cat/1.jpg", "dog/1.jpg"]


@pytest.mark.parametrize("table", ["images", "files"])
def test_source_is_listed_again_after_a_commit_to_one_of_its_tables(tmp_path: Path, table: str) -> None:
    """With an outdated listing, what another run has committed would be deleted, also to `images` alone."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path / "home")))
    etl = EtlConfig(source=str(tmp_path / "source"))
    write_images(tmp_path / "source", per_class=1)
    listed = prepare_source(etl, storage, SparkConfig())
    assert relist_if_outdated(None, etl, listed, storage) is listed
    write_images(tmp_path / "source", per_class=1, first=1)
    log = Path(storage.table(table), "_delta_log")
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("{}")

    again = relist_if_outdated(None, etl, listed, storage)

    assert (listed.listing.num_rows, again.listing.num_rows) == (3, 6)
    assert relist_if_outdated(None, etl, again, storage) is again
