"""Full disks of several sizes, and read-only ones; one session serves a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.spark.session import spark_session
from tests.builders.disks import (
    Disk,
    check_full_in_cache,
    check_full_in_etl,
    check_full_in_growth,
    check_read_only,
    mounted_disk,
)
from tests.builders.etl_and_cache import SPARK, make_storage


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Return a disk with room for everything."""
    storage = make_storage(tmp_path / "home")
    elsewhere = make_storage(tmp_path / "session")  # Its temporary files are none of the test's.
    with mounted_disk(tmp_path / "disk", storage, kilobytes=20_000) as disk, spark_session(SPARK, elsewhere):
        yield disk


def test_a_read_only_disk_is_refused_before_work_starts(disk, undisturbed) -> None:
    """By both stages."""
    check_read_only(disk, undisturbed.source)


def test_a_disk_that_is_too_small_for_new_tables_is_left_without(disk, undisturbed, draw) -> None:
    """Whatever the moment at which it is full."""
    for _ in range(3):
        disk.remount(f"size={draw.randrange(40, 250)}k")
        check_full_in_etl(disk, undisturbed.source)


def test_a_disk_that_is_too_small_for_more_images_keeps_the_tables(disk, undisturbed, draw) -> None:
    """At their version."""
    check_full_in_growth(disk, undisturbed, free_kilobytes=draw.randrange(40, 250))


def test_a_disk_that_fills_while_a_cache_is_built_has_none(disk, undisturbed) -> None:
    """Nor a half one."""
    check_full_in_cache(disk, undisturbed)
