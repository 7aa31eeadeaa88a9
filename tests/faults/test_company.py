"""Two runs at once, and a source that somebody writes to."""

import pytest

from tests.builders.concurrent_runs import check_changing_source, check_two_at_once


@pytest.mark.parametrize("number", range(2))
def test_two_runs_at_once_take_turns(undisturbed, tmp_path, draw, number) -> None:
    """Started up to some seconds apart, so that they meet at different places."""
    check_two_at_once(undisturbed, tmp_path / "home", seconds_apart=draw.uniform(0, 6) * number)


def test_files_that_change_while_they_are_read_end_no_run(undisturbed, tmp_path) -> None:
    """They are read again by the next."""
    check_changing_source(undisturbed, tmp_path)
