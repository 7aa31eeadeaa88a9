"""The faults of tests/faults, each in its cheapest form: one moment each, on few pictures."""

import pytest

from tests.faults.company import check_changing_source, check_two_at_once
from tests.faults.disks import check_full_in_cache, check_full_in_etl, check_read_only, mounted_disk
from tests.faults.killing import Undisturbed, check_killed, run_undisturbed
from tests.faults.one_run import make_storage


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory) -> Undisturbed:
    """Run once undisturbed."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=40)


@pytest.mark.parametrize(("victim", "moment"), [("driver", "images"), ("jvm", "building")])
def test_a_killed_run_is_made_good_by_the_next(undisturbed, tmp_path, victim, moment) -> None:
    """The driver while a table is created, the JVM while a cache is built."""
    check_killed(undisturbed, tmp_path / "home", victim, moment, seconds=0)


def test_a_full_or_read_only_disk_is_one_sentence_and_leaves_nothing(undisturbed, tmp_path) -> None:
    """Read-only, then full for the tables, then filled by somebody else while the cache is built."""
    with mounted_disk(tmp_path / "disk", make_storage(tmp_path / "home"), kilobytes=120) as disk:
        check_read_only(disk, undisturbed.source)
        check_full_in_etl(disk, undisturbed.source)
        disk.remount("size=5m")
        check_full_in_cache(disk, undisturbed)


def test_files_that_change_while_they_are_read_end_no_run(undisturbed, tmp_path) -> None:
    """They are read again by the next."""
    check_changing_source(undisturbed, tmp_path)


def test_two_runs_at_once_take_turns(undisturbed, tmp_path) -> None:
    """On tables and cache; the second finds its work done."""
    check_two_at_once(undisturbed, tmp_path / "home", seconds_apart=0)
