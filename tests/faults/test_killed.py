"""ETL and cache materialisation whose driver, Python worker or JVM is killed at a random moment."""

import signal

import pytest

from tests.builders.etl_and_cache import make_storage
from tests.builders.killed_runs import (
    MOMENTS,
    VICTIMS,
    damaged_caches,
    leftovers,
    run_and_kill,
    run_and_read,
    run_to_end,
    session_folders,
)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_run_after_killed_run_equals_undisturbed_run(undisturbed, tmp_path, draw, victim, moment) -> None:
    """A run after a kill has the rows and pixels of an undisturbed run; no process, file or damaged cache is left."""
    # Where the moment is over before the delay, or the driver has no session left, the kill tests nothing: the second
    # attempt kills at once.
    for home, seconds in (("home", draw.uniform(0, 0.4)), ("home-at-once", 0.0)):
        storage = make_storage(tmp_path / home)
        killed, ended = run_and_kill(undisturbed.source, storage, victim, moment, seconds)
        assert ended.left_running == []
        if not killed:
            assert ended.returncode == 0, ended.output
        elif victim == "driver":
            assert ended.returncode == -signal.SIGKILL, ended.output
            killed = bool(session_folders(storage))
        if killed:
            break
    assert killed
    assert damaged_caches(storage) == []

    again = run_to_end(undisturbed.source, storage)

    assert again.returncode == 0, again.output
    assert again.left_running == []
    assert leftovers(storage) == []
    contents = run_and_read(undisturbed.source, storage)
    assert contents.duplicate_images() == []
    assert contents == undisturbed.contents
