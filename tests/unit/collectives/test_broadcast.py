"""Values and tensors that one rank sends to the others."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tasks.collectives.reducer import Reducer, broadcast_tensors, broadcast_value, gather_rows, wait_for_all
from tasks.refs import RunRef
from tasks.train.progress import ResumePoint
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer

RESUME_POINT = TypeAdapter(ResumePoint)
POINT = ResumePoint(finished=RunRef(run_id="7f"), checkpoint="step-00.pt")


@pytest.mark.parametrize("root", [0, 2])
def test_every_rank_gets_the_value_of_one(root: int) -> None:
    """A dataclass with a model in it arrives as equal; other ranks have no value to give."""

    def rank_main(reducer: ThreadReducer) -> ResumePoint:
        return broadcast_value(reducer, RESUME_POINT, POINT if reducer.rank == root else None, root)

    assert ThreadRanks(3).run(rank_main) == [POINT] * 3


def test_value_of_another_type_is_refused() -> None:
    """A receiver checks the declared type, and nothing else is built from what it receives."""

    def rank_main(reducer: ThreadReducer) -> object:
        kind = TypeAdapter(str) if reducer.rank == 0 else TypeAdapter(int)
        return broadcast_value(reducer, kind, "text" if reducer.rank == 0 else None)

    with pytest.raises(ValidationError, match="valid integer"):
        ThreadRanks(2).run(rank_main)


def test_single_process_gets_its_own_value() -> None:
    """Nothing is copied, and None is a value like others."""
    assert broadcast_value(Reducer(), RESUME_POINT, POINT) is POINT
    assert broadcast_value(Reducer(), TypeAdapter(int | None), None) is None


@pytest.mark.parametrize("root", [0, 1])
def test_tensors_arrive_in_every_bit_and_type(root: int) -> None:
    """Scalars, empty tensors and those in another memory format arrive by name; the sender's are copied."""
    sent = {
        "statistics": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "count": torch.tensor(2**40),
        "none": torch.empty(0, dtype=torch.bfloat16),
    }

    def rank_main(reducer: Reducer) -> dict[str, torch.Tensor]:
        wait_for_all(reducer)
        return broadcast_tensors(reducer, sent if reducer.rank == root else {}, root)

    for found in [*ThreadRanks(2).run(rank_main), broadcast_tensors(Reducer(), sent)]:
        assert found.keys() == sent.keys()
        for name, value in sent.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(found[name], value)
            assert found[name] is not value


@pytest.mark.parametrize("numbers", [(2, 0, 3), (0, 0, 0)])
def test_rows_of_all_ranks_are_gathered_in_their_order(numbers: tuple[int, ...]) -> None:
    """Each rank may have another number of rows, or none."""
    rows = [torch.full((number, 2), float(rank), dtype=torch.float64) for rank, number in enumerate(numbers)]

    for found in ThreadRanks(3).run(lambda reducer: gather_rows(reducer, rows[reducer.rank])):
        assert torch.equal(found, torch.cat(rows))
