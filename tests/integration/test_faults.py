"""The faults of tests/faults, each in its cheapest form: one moment each, on few pictures."""

import pytest

from tests.faults.company import check_changing_source, check_killed_in_company
from tests.faults.disks import check_full_in_etl, check_read_only, mounted_disk
from tests.faults.killing import Undisturbed, check_killed_workers, run_undisturbed
from tests.faults.one_run import make_storage


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory) -> Undisturbed:
    """Run once undisturbed."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=25)


def test_a_full_or_read_only_disk_is_one_sentence_and_leaves_nothing(undisturbed, tmp_path) -> None:
    """Read-only, then full for the tables; a disk that fills while the cache is built is in tests/faults."""
    with mounted_disk(tmp_path / "disk", make_storage(tmp_path / "home"), kilobytes=60) as disk:
        check_read_only(disk, undisturbed.source)
        check_full_in_etl(disk, undisturbed.source)


def test_killed_python_workers_and_files_that_change_while_they_are_read_spoil_nothing(undisturbed, tmp_path) -> None:
    """Of the runs, the first fails, the second leaves out what changed, and the third has everything."""
    check_killed_workers(undisturbed.source, make_storage(tmp_path / "home"))
    check_changing_source(undisturbed, tmp_path)


def test_two_runs_at_once_that_are_killed_are_made_good_by_a_third(undisturbed, tmp_path) -> None:
    """The driver of the one in ETL, then the JVM of the other, in materialisation."""
    check_killed_in_company(undisturbed, tmp_path / "home")
