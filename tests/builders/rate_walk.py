"""The walk of the learning rate: from `train_model` to the first `set_learning_rate`.

A reader who follows the rate enters the functions that are active when it is set. Of the functions before them, the
reader enters those whose code has a name of the rate (RATE): an argument, a local or an attribute.
"""

from types import CodeType, FrameType

from tasks.config.cache import CacheConfig
from tasks.storage import Storage
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.caches import noise, write_cache
from tests.builders.training_runs import SMALL
from tests.builders.walk import StopWalk, Walk, walk

RATE = ("learning_rate", "schedule", "peak_rate")
"""Parts of the names of the number, of the factory and of the callable."""


def _has_rate(code: CodeType) -> bool:
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, code.co_qualname.lower())
    return any(part in name for name in names for part in RATE)


def walk_of_rate(storage: Storage) -> Walk:
    """Train on a small cache in a home until the learning rate is set, and return the walk of the rate to there."""
    cache = write_cache(
        f"{storage.cache}/0123456789abcdef",
        {"train": 16, "val": 4, "test": 4},
        lambda _split, row: (noise(row, 32), row % 2),
        ("even", "odd"),
        CacheConfig(image_size=32),
        rows_per_group=4,
        groups_per_file=9,
    )
    spec = TrainingSpec(train=SMALL, cache=cache, storage=storage)
    active: set[CodeType] = set()

    def see(frame: FrameType) -> None:
        if frame.f_code.co_name == "set_learning_rate":
            caller: FrameType | None = frame
            while caller is not None:
                active.add(caller.f_code)
                caller = caller.f_back
            raise StopWalk

    found = walk(lambda: train_model(spec), see, lambda code: code in active or _has_rate(code))
    assert active, "the learning rate was set"
    return found
