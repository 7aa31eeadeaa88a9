"""The walk of a reader who follows the learning rate through the code."""

from tasks.storage import Storage
from tests.builders.rate_walk import walk_of_rate


def test_learning_rate_is_followed_through_few_files(storage: Storage) -> None:
    """From the entry of training to the optimizer's parameter groups: at most ten files, and ten returns to them."""
    found = walk_of_rate(storage)

    assert found.steps[-1] == ("tasks/train/loop.py", "set_learning_rate")
    assert ("tasks/train/schedule.py", "Schedule.__call__") in found.steps
    assert found.num_files <= 10, found.steps
    assert found.num_returns <= 10, found.steps
