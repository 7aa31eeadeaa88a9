"""ETL and cache materialisation on full disks of several sizes, and on read-only disks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.cache.materialize import materialize_cache
from tasks.errors import DiskFull, WrongInput
from tasks.etl.ingest import ingest_images
from tasks.refs import TableRef
from tasks.spark.session import spark_session
from tasks.tables import snapshots
from tests.builders.disks import Disk, filled_while_building, ingest_a_third, mounted_disk
from tests.builders.etl_and_cache import CACHE, SPARK, make_storage, settings
from tests.builders.killed_runs import leftovers, run_and_read


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Return a disk with room for everything, and keep one session for the whole test."""
    storage = make_storage(tmp_path / "home")
    elsewhere = make_storage(tmp_path / "session")  # No test looks at its temporary files.
    with mounted_disk(tmp_path / "disk", storage, kilobytes=20_000) as disk, spark_session(SPARK, elsewhere):
        yield disk


def test_read_only_disk_is_rejected_by_both_stages(disk, undisturbed) -> None:
    """ETL and cache name the setting and the reason, and write nothing."""
    disk.remount("ro")
    with pytest.raises(WrongInput, match=r"storage.tables is '.*', where nothing can be written \(Read-only"):
        ingest_images(settings(undisturbed.source), disk.storage, SPARK)
    with pytest.raises(WrongInput, match=r"storage.cache is '.*', where nothing can be written \(Read-only"):
        materialize_cache(CACHE, TableRef(path="nowhere", version=0), disk.storage, SPARK)
    disk.remount("rw")
    assert list(disk.folder.iterdir()) == []


def test_disk_too_small_for_new_tables_keeps_no_part_of_them(disk, undisturbed, draw) -> None:
    """At three random sizes, ETL fails with a message of one line; the next run would remove every file left."""
    # Ascending: a disk does not become smaller than what the run before has left on it.
    for size in sorted(draw.sample(range(40, 250), 3)):
        disk.remount(f"size={size}k")
        with pytest.raises(DiskFull, match=r"a disk was full .*'.*/tables' has [\d.]+ MB free") as raised:
            ingest_images(settings(undisturbed.source), disk.storage, SPARK)
        assert "\n" not in str(raised.value)
        assert disk.files_that_stay() == []


def test_disk_too_small_for_more_images_keeps_the_tables(disk, undisturbed, tmp_path, draw) -> None:
    """Tables stay at their version; with more room, ETL ends like undisturbed runs on the same files."""
    source, roomy = shutil.copytree(undisturbed.source, tmp_path / "grown"), make_storage(tmp_path / "roomy")
    # Splits depend on what each run finds in the source: two runs are compared with two.
    ingest_a_third(source, roomy)
    expected = run_and_read(source, roomy)
    images = ingest_a_third(source, disk.storage)
    disk.leave_free(kilobytes=draw.randrange(40, 250))

    with pytest.raises(DiskFull, match=r"a disk was full .*'.*/tables' has [\d.]+ MB free"):
        ingest_images(settings(source), disk.storage, SPARK)

    with spark_session(SPARK, disk.storage) as spark:
        assert snapshots.latest(spark, images.path) == images
    disk.remount("size=20m")
    contents = run_and_read(source, disk.storage)
    assert contents.duplicate_images() == []
    assert contents == expected
    assert contents.without_splits() == undisturbed.contents.without_splits()
    assert leftovers(disk.storage) == []


def test_disk_that_fills_while_a_cache_is_built_keeps_no_part_of_it(disk, undisturbed) -> None:
    """A disk that another process fills has no cache; with more room, the cache is that of an undisturbed run."""
    images = ingest_images(settings(undisturbed.source), disk.storage, SPARK).images

    with (
        filled_while_building(disk),
        pytest.raises(DiskFull, match=r"a disk was full .*'.*/cache' has [\d.]+ MB free"),
    ):
        materialize_cache(CACHE, images, disk.storage, SPARK)

    assert [path for path in Path(disk.storage.cache).rglob("*") if path.is_dir()] == []
    contents = run_and_read(undisturbed.source, disk.storage)
    assert contents.duplicate_images() == []
    assert contents == undisturbed.contents
    assert leftovers(disk.storage) == []
