"""The walk of a reader who follows the learning rate through the code."""

from tasks.config.cache import CacheConfig
from tasks.storage import Storage
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.caches import noise, write_cache
from tests.builders.rate_walk import walk_of_rate
from tests.builders.training_runs import SMALL


def test_learning_rate_is_followed_through_few_files(storage: Storage) -> None:
    """From the entry of training to the optimizer's parameter groups: at most ten files, and ten returns to them."""
    cache = write_cache(
        f"{storage.cache}/0123456789abcdef",
        {"train": 16, "val": 4, "test": 4},
        lambda _split, row: (noise(row, 32), row % 2),
        ("even", "odd"),
        CacheConfig(image_size=32),
        rows_per_group=4,
        groups_per_file=9,
    )

    found = walk_of_rate(lambda: train_model(TrainingSpec(train=SMALL, cache=cache, storage=storage)))

    assert found.steps[-1] == ("tasks/train/loop.py", "set_learning_rate")
    assert ("tasks/train/schedule.py", "Schedule.__call__") in found.steps
    assert found.num_files <= 10, found.steps
    assert found.num_returns <= 10, found.steps
