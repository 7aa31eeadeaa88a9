"""Promotions and rollbacks that are killed at random moments."""

import pytest

from tasks.config.storage import StorageConfig
from tasks.model_package.description import FILE_LIMITS
from tasks.registry.aliases import CHAMPION, check_predicts
from tasks.registry.judged import JUDGED_TAG
from tasks.storage import resolve_storage
from tasks.tracking.models import model_with_alias, version_tags
from tests.builders.killed_promotions import (
    NAME,
    STAGES,
    UNUSABLE,
    Prepared,
    copied,
    prepare,
    run_and_kill,
    state_of,
    try_here,
)
from tests.faults.conftest import at_most

ROUNDS = at_most(20)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    """Return a registry with a champion, and another with its successor."""
    folder = tmp_path_factory.mktemp("prepared")
    try_here()
    return prepare(resolve_storage(StorageConfig(home=str(folder / "home"))), folder)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", STAGES)
def test_run_after_a_kill_equals_an_undisturbed_run(prepared, tmp_path, draw, stage) -> None:
    """After a kill the champion is whole; after the next run aliases, tags, decisions and predictions are the same.

    A challenger counts once, and an unusable champion stays until the run that replaces it is done.
    """
    expected = copied(prepared.storages[stage], tmp_path / "undisturbed")
    took = run_and_kill(stage, expected, prepared.run, None)
    assert took is not None
    wanted = state_of(expected)
    judged = [tag for tag in wanted["model"] if tag.startswith(JUDGED_TAG)]
    assert judged == ([f"{JUDGED_TAG}{prepared.run.run_id}"] if stage in {"promote", "keep", "rollback"} else [])
    assert wanted["aliases"][CHAMPION] == (2 if stage in {"promote", "replace"} else 1)
    num_killed = 0
    for number in range(ROUNDS):
        storage = copied(prepared.storages[stage], tmp_path / f"home-{number}")
        lasted = run_and_kill(stage, storage, prepared.run, draw.uniform(0, took))
        num_killed += lasted is None
        took = lasted or took  # On a machine with other work, the duration changes.

        champion = model_with_alias(storage, NAME, CHAMPION)
        tags = version_tags(storage, champion)
        assert {"candidates", "test_accuracy", "lakevision.decision", "lakevision.promotion"} <= tags.keys()
        assert {f"lakevision.sha256.{file}" for file in FILE_LIMITS} <= tags.keys()
        if UNUSABLE.items() <= tags.items():
            assert (stage in {"stay", "replace"}, champion.version) == (True, 1)
        else:
            check_predicts(storage, champion, "the champion")

        STAGES[stage](storage, prepared.run)

        assert state_of(storage) == wanted, f"round {number}"
    assert num_killed > ROUNDS / 2
