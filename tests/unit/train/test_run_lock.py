"""The lock of a training run, which another process has."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import TimeLimitExceeded
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train import run as run_module
from tasks.train.checkpoint_files import training_lock
from tasks.train.run import lock_training
from tasks.train.spec import TrainingSpec

WAITS = r"another process has this training run \('.*\.lock' is locked\): waiting until it ends"


@pytest.fixture
def spec(storage: Storage) -> TrainingSpec:
    """Return a training run whose folder exists."""
    train = TrainConfig(weights="none", freeze_backbone=False)
    cache = CacheRef(url="/nowhere", digest="d" * 64)
    spec = TrainingSpec(train=train, distributed=DistributedConfig(num_ranks=2), cache=cache, storage=storage)
    (storage.checkpoints / spec.key).mkdir(parents=True)
    return spec


def lock_of(spec: TrainingSpec) -> Path:
    """Return the file of its lock."""
    return training_lock(spec.storage.checkpoints / spec.key)


@contextmanager
def held_elsewhere(spec: TrainingSpec) -> Iterator[threading.Event]:
    """Let another thread hold the lock until the end of the context, or until the event that it yields is set."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with filelock.FileLock(lock_of(spec)):
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield over
    finally:
        over.set()
        thread.join()


def test_process_waits_for_another_one_and_logs_it(
    spec: TrainingSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    messages_of: Callable[[str], list[str]],
) -> None:
    """It waits without a limit, since the other process may be training."""
    monkeypatch.setattr(run_module, "LOST_RANK_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "lakevision.train")
    logger = logging.getLogger("lakevision.train")
    with held_elsewhere(spec) as over:

        def release_soon(_record: logging.LogRecord) -> bool:
            threading.Timer(0.5, over.set).start()
            return True

        logger.addFilter(release_soon)
        try:
            lock_training(spec).release()
        finally:
            logger.removeFilter(release_soon)
    lock_training(spec).release()
    (message,) = messages_of("lakevision.train")
    assert re.fullmatch(WAITS, message)


def test_lost_rank_that_keeps_the_lock_is_reported(spec: TrainingSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose host hangs; ranks that start after a loss do not wait for it forever."""
    monkeypatch.setattr(run_module, "LOST_RANK_SECONDS", 0.3)
    again = spec.model_copy(update={"restart": 1, "lost_hosts": ("two",)})
    with (
        held_elsewhere(spec),
        pytest.raises(TimeLimitExceeded, match=r"that hangs \(two\): end it there"),
    ):
        lock_training(again)
    lock_training(again).release()
