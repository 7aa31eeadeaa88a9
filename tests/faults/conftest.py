"""Fixtures of the fault tests: a random generator whose seed is printed, and one undisturbed run."""

import os
import random
import secrets

import pytest

from tasks.refs import CacheRef
from tasks.storage import Storage
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_runs import UndisturbedRun, run_undisturbed

SEED = os.environ.get("LAKEVISION_FAULT_SEED") or secrets.token_hex(4)


MOST_ROUNDS = int(os.environ.get("LAKEVISION_FAULT_ROUNDS", "1000"))


def at_most(rounds: int) -> int:
    """Return the number of rounds of a test, or LAKEVISION_FAULT_ROUNDS where that is less."""
    return min(rounds, MOST_ROUNDS)


def draw_for(name: str) -> random.Random:
    """Return the generator of a test's random moments, and print the seed that repeats them."""
    print(f"to repeat it: LAKEVISION_FAULT_SEED={SEED}")
    return random.Random(f"{SEED} {name}")


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Return the generator of a test's random moments."""
    return draw_for(request.node.name)


@pytest.fixture
def cache(make_images, storage: Storage) -> CacheRef:  # type: ignore[no-untyped-def]  # a fixture
    """Return a cache of 60 images."""
    return hand_made_cache(make_images(), f"{storage.cache}/by-hand")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> UndisturbedRun:
    """Return a source of enough images to read for a while, and the contents after an undisturbed run on it."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=150)
