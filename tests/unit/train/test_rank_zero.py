"""Work of rank 0 that the others wait for."""

import time

import pytest

from tasks.collectives import SingleProcess
from tasks.train import rank_zero as module
from tasks.train.rank_zero import run_on_rank_zero
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer


def test_one_process_just_works() -> None:
    """There is nobody to tell."""
    assert run_on_rank_zero(SingleProcess(), lambda: 3) == 3


def test_the_others_are_told_that_it_goes_on_and_get_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none of them waits in one message for longer than Horovod allows."""
    monkeypatch.setattr(module, "TELL_SECONDS", 0.01)
    heard: list[object] = []

    def rank_main(reducer: ThreadReducer) -> object:
        real = reducer.broadcast

        def broadcast(value: object, root: int = 0) -> object:
            said = real(value, root)
            if reducer.rank == 1:
                heard.append(said)
            return said

        monkeypatch.setattr(reducer, "broadcast", broadcast)
        return run_on_rank_zero(reducer, lambda: time.sleep(0.2) or "done")

    assert ThreadRanks(3).run(rank_main) == ["done"] * 3
    assert heard[-1] == (True, "done")
    assert len(heard) > 2
    assert set(heard[:-1]) == {(False, None)}


def test_what_it_raises_ends_rank_0() -> None:
    """And with it, through the launcher, the others."""

    def fail() -> None:
        raise OSError("no room")

    def rank_main(reducer: ThreadReducer) -> None:
        run_on_rank_zero(reducer, fail)

    with pytest.raises(OSError, match="no room"):
        ThreadRanks(2).run(rank_main)
