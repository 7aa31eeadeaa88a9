"""Homes of earlier releases at the paths at which they were made; copies are in tests/integration."""

from tasks.spark.session import keep_spark
from tests.builders import release_home
from tests.builders.release_home import FOLDER
from tests.integration.test_homes_of_releases import check_home


def test_home_of_an_earlier_release_goes_on_where_it_was_made() -> None:
    """Nothing is built, trained or renamed again."""
    with release_home.source_at_its_place(), keep_spark():
        check_home(FOLDER / "home")
