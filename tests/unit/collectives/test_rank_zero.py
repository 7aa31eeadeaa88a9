"""Work on rank 0 while the other ranks wait."""

import time

import pytest
import torch
from pydantic import TypeAdapter

from tasks.collectives import reducer as module
from tasks.collectives.reducer import Reducer, run_on_rank_zero
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer


def test_single_process_runs_the_work() -> None:
    """A single process returns the result of the work."""
    assert run_on_rank_zero(Reducer(), TypeAdapter(int), lambda: 3) == 3


def test_other_ranks_get_heartbeats_and_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of rank 0 keep each wait of the other ranks below Horovod's timeout."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)
    received: list[object] = []

    def rank_main(reducer: ThreadReducer) -> object:
        real = reducer.broadcast

        def broadcast(values: torch.Tensor, root: int = 0) -> torch.Tensor:
            message = real(values, root)
            if reducer.rank == 1 and message.dtype == torch.uint8:
                received.append(bytes(message.tolist()))
            return message

        monkeypatch.setattr(reducer, "broadcast", broadcast)
        return run_on_rank_zero(reducer, TypeAdapter(str), lambda: time.sleep(0.2) or "done")

    assert ThreadRanks(3).run(rank_main) == ["done"] * 3
    assert received[-2:] == [b"true", b'"done"']
    assert len(received) > 2
    assert set(received[:-2]) == {b"false"}


def test_exception_in_the_work_is_raised_on_rank_0() -> None:
    """An exception ends rank 0, after which the launcher ends the others."""

    def fail() -> None:
        raise OSError("no room")

    def rank_main(reducer: ThreadReducer) -> None:
        run_on_rank_zero(reducer, TypeAdapter(None), fail)

    with pytest.raises(OSError, match="no room"):
        ThreadRanks(2).run(rank_main)
