"""Commits of each kind whose process is killed or interrupted at random moments."""

import signal
from collections import Counter

import pytest

from tasks.spark.session import spark_session
from tests.builders.etl_and_cache import SPARK, make_storage
from tests.builders.etl_tables import ledger
from tests.builders.interrupted_commits import (
    KINDS,
    ROWS,
    run_and_end,
    source_of,
    tables_of,
    versions_of,
)
from tests.faults.conftest import at_most

ROUNDS = at_most(20)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_version_reads_and_no_row_is_lost_or_double(kind, number, draw, tmp_path) -> None:
    """A commit is there as a whole or not at all; the steps that were ended are completed when they run again."""
    storage, step = make_storage(tmp_path / "home"), 0
    for _round in range(ROUNDS):
        step, ended = run_and_end(kind, storage, step, number, draw.uniform(0, 4))
        assert ended.left_running == [], ended.output
        assert ended.returncode != 0, ended.output
        for table in tables_of(storage):
            for version in versions_of(table):
                # The source of a stream gets the rows of a step again, which are merged by their key.
                assert table.name == "source" or set(version.values()) <= {1}, table
                if table.name == "predictions" or table.name.startswith(("created", "appended")):
                    sizes = Counter(key.split("-")[0] for key in version)
                    assert set(sizes.values()) <= {ROWS}, table
    with spark_session(SPARK, storage) as spark:
        for again in range(step if kind in {"ingest", "replace", "stream"} else 0, step):
            KINDS["merge" if kind == "rewrite" else kind](spark, storage, again)
        KINDS[kind](spark, storage, step)
        newest = {table.name: versions_of(table)[-1] for table in tables_of(storage)}
        if kind in {"ingest", "replace"}:
            files = {
                str(file.relative_to(source))
                for source in [source_of(storage, step % 2 if kind == "replace" else 0)]
                for file in source.rglob("*.png")
            }
            outcomes = {
                path: outcome for path, (outcome, _reason) in ledger(spark, storage).items() if outcome != "deleted"
            }
            assert set(outcomes) == files
            assert len(newest["images"]) == sum(outcome == "stored" for outcome in outcomes.values())
    if kind in {"merge", "rewrite", "stream"}:
        assert len(newest["predictions"]) == ROWS * (step + 1)
    if kind == "create":
        assert [len(newest[f"created-{made}"]) for made in range(step + 1)] == [ROWS] * (step + 1)
    if kind == "append":
        assert [len(newest[f"appended-{made}"]) for made in range(step + 1)] == [2 * ROWS] * (step + 1)
    if kind == "delete":
        assert set(newest["predictions"]) == {f"{step}-{row}" for row in range(ROWS)}
