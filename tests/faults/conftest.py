"""What all faults share: a seed that is printed, and one undisturbed run."""

import os
import random
import secrets

import pytest

from tests.builders.killed_runs import Undisturbed, run_undisturbed

SEED = os.environ.get("LAKEVISION_FAULT_SEED") or secrets.token_hex(4)


def draw_for(name: str) -> random.Random:
    """Return what draws the moments of a test; its seed is printed, and given back draws the same ones."""
    print(f"to repeat it: LAKEVISION_FAULT_SEED={SEED}")
    return random.Random(f"{SEED} {name}")


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Return what draws a test's moments."""
    return draw_for(request.node.name)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Run once undisturbed, on images that take a while to read."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=150)
