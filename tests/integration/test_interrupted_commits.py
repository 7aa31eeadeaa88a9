"""Commits of each kind that a signal interrupts; twenty kills and interrupts of each kind are in tests/faults."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from py4j.protocol import Py4JNetworkError

from tasks.errors import LockLost
from tasks.etl.staging import staged_parts
from tasks.system.locks import leased
from tasks.system.signals import interrupt_on
from tasks.tables import committing
from tasks.tables.committing import commit, is_unsure
from tasks.tables.delta_internals import INTERNALS
from tests.builders.interrupted_commits import KINDS, ROWS, tables_of, versions_of


@pytest.fixture(autouse=True)
def _interrupted_by_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", ["create", "rewrite", "delete", "set_properties", "ingest", "replace"])
def test_interrupt_of_a_commit_is_raised_after_its_end(spark, storage, monkeypatch, kind):
    """The signal comes as soon as the commit has begun, which is whole then, or was not made."""
    KINDS[kind](spark, storage, 0)
    ended, commits = committing._ended, []

    def interrupt(path, work):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        try:
            return ended(path, work)
        finally:
            commits.append(path)

    monkeypatch.setattr(committing, "_ended", interrupt)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        KINDS[kind](spark, storage, 1)
    monkeypatch.setattr(committing, "_ended", ended)

    assert len(commits) == 1
    for table in tables_of(storage):
        assert not is_unsure(str(table))
        for version in versions_of(table):
            assert set(version.values()) <= {1}
            if table.name == "predictions":
                assert set(Counter(key.split("-")[0] for key in version).values()) <= {ROWS}
    KINDS[kind](spark, storage, 2)
    assert all(set(versions_of(table)[-1].values()) <= {1} for table in tables_of(storage))


def test_no_file_is_removed_while_a_commit_may_be_under_way(tmp_path, monkeypatch):
    """The connection to a JVM that lives on is lost in the commit, which may name the parts; the next run looks."""
    path = str(tmp_path / "images")
    monkeypatch.setattr(committing, "jvm_is_alive", lambda: True)

    def lose() -> None:
        raise Py4JNetworkError("Answer from Java side is empty")

    def write_part_and(work) -> None:
        with staged_parts(path, None) as target:
            (tmp_path / "images" / target.new_name()).touch()
            commit(path, work)

    with pytest.raises(Py4JNetworkError):
        write_part_and(lose)
    assert is_unsure(path)
    assert len(list((tmp_path / "images").glob("*.parquet"))) == 1
    with pytest.raises(ZeroDivisionError):
        write_part_and(lambda: 1 // 0)
    assert not is_unsure(path)
    assert list((tmp_path / "images").glob("*.parquet")) == []


def test_commit_without_its_lease_is_not_begun(tmp_path):
    """A lease that ends while the commit is prepared is the reason that is given."""
    left, done = [1], []

    def check() -> None:
        if not left:
            raise LockLost("the exclusive lock was not renewed")

    def refused() -> None:
        left.clear()
        raise OSError("refused")

    with leased(check):
        commit(str(tmp_path), lambda: done.append("before"))
        with pytest.raises(LockLost, match="was not renewed"):
            commit(str(tmp_path), refused)
        with pytest.raises(LockLost, match="was not renewed"):
            commit(str(tmp_path), lambda: done.append("after"))
    assert done == ["before"]


def test_internals_of_delta_are_where_they_are_called(spark):
    """A newer Delta that moves one of them fails here, and not in a run."""
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    missing = {
        f"{name}.{method}"
        for name, methods in INTERNALS.items()
        for method in methods
        if method not in {found.getName() for found in loader.loadClass(name).getMethods()}
    }
    assert missing == set(), f"Delta has no {missing}, which tasks/tables/delta_internals.py calls"
