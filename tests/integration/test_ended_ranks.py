"""Ranks that end unexpectedly: by an error, for lack of memory, or killed on a GPU that another run waits for."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tasks.config.distributed import DistributedConfig
from tasks.launch.launcher import launch_ranks
from tasks.launch.rank_process import OUT_OF_MEMORY
from tasks.launch.restarts import RankFailed, RanksLost
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.checkpoint_files import newest_position
from tasks.train.spec import TrainingSpec
from tests.builders.gpu_watch import GpuWatch
from tests.builders.killed_training import (
    ENDLESS,
    TRAIN,
    own_ranks,
    pids_of_ranks,
    runs_in,
    start_launcher,
)
from tests.builders.memory_limits import memory_cgroup
from tests.builders.rank_errors import error_in_rank_1
from tests.builders.submissions import WAIT_SECONDS, wait_until

TWO_RANKS = DistributedConfig(num_ranks=2, backend="torch")

WAITS = "waiting for a GPU of 1 on this machine, which other training runs, or ranks that have not ended, use"


@pytest.fixture
def spec(cache: CacheRef, storage: Storage) -> TrainingSpec:
    """Return a training run with two ranks."""
    return TrainingSpec(train=TRAIN, distributed=TWO_RANKS, cache=cache, storage=storage)


def test_error_in_one_rank_ends_all_and_the_next_run_completes_it(spec: TrainingSpec, tmp_path: Path) -> None:
    """An error that nothing expects, at any point: the message has its lines, the other rank and the MLflow run end."""
    with (
        error_in_rank_1(tmp_path / "site", 0) as error,
        pytest.raises(RankFailed, match=r"(?s)^rank 1 ended with status 1; .*ZeroDivisionError"),
    ):
        launch_ranks(spec, error)
    assert own_ranks() == []
    ((ended, status),) = runs_in(spec.storage)
    assert status in {"KILLED", "FAILED"}
    assert launch_ranks(spec).run_id == ended
    assert runs_in(spec.storage) == [(ended, "FINISHED")]


@pytest.mark.fault
def test_rank_that_the_kernel_kills_for_its_memory_is_told_and_the_next_run_completes_it(spec: TrainingSpec) -> None:
    """It is moved to a cgroup without memory: the error says what to change, the other rank and the MLflow run end."""
    with memory_cgroup(f"lakevision-test-{os.getpid()}", 2 * 2**20) as processes:

        def move(event: dict[str, int]) -> None:
            if event["epoch"] == 1:
                processes.write_text(str(pids_of_ranks()[0]))

        with pytest.raises(RanksLost) as lost:
            launch_ranks(spec, move)
        first, *_, last = str(lost.value).splitlines()
        assert first.startswith("rank 0 was ended by signal 9")
        assert last == OUT_OF_MEMORY
        assert own_ranks() == []
    ((ended, status),) = runs_in(spec.storage)
    assert status in {"KILLED", "FAILED"}
    assert launch_ranks(spec).run_id == ended
    assert runs_in(spec.storage) == [(ended, "FINISHED")]


@pytest.mark.fault
def test_run_that_waits_for_a_gpu_begins_when_the_rank_that_has_it_is_killed(
    spec: TrainingSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the first one names the rank; the ranks of both are never on the GPU at once."""
    # The name of a GPU that is not there: the ranks train on the CPU. The slots are not those of other tests.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as opened:
        watch = GpuWatch()
        opened.callback(watch.end)
        watch.add(os.getpid())
        one_rank = spec.model_copy(update={"distributed": DistributedConfig(num_ranks=1)})
        holding = one_rank.model_copy(update={"train": ENDLESS})
        holder = opened.enter_context(start_launcher(holding, tmp_path / "spec.json"))
        opened.callback(holder.kill)
        watch.add(holder.pid)
        wait_until(lambda: newest_position(spec.storage.checkpoints / holding.key))
        (victim,) = watch.ranks(holder.pid)
        # The rank has the lock as well: were its launcher killed, the GPU would be in use until it has ended.
        assert "gpu-GPU-a.exclusive.lock" in {Path(file.path).name for file in victim.open_files()}

        waiting = one_rank.model_copy(update={"train": TRAIN.model_copy(update={"max_epochs": 1})})
        pool, stop = opened.enter_context(ThreadPoolExecutor(1)), threading.Event()
        opened.callback(stop.set)
        with caplog.at_level(logging.INFO, "lakevision.ranks"):
            launched = pool.submit(launch_ranks, waiting, None, stop)
            wait_until(lambda: WAITS in caplog.messages)
        assert own_ranks() == []
        victim.kill()
        _output, errors = holder.communicate(timeout=WAIT_SECONDS)
        assert "rank 0 was ended by signal 9" in errors
        wait_until(lambda: watch.ranks(os.getpid()))
        run = launched.result(timeout=WAIT_SECONDS)
    assert watch.shared == set()
    assert (watch.ranks(holder.pid), own_ranks()) == ([], [])
    statuses = dict(runs_in(spec.storage))
    assert statuses.pop(run.run_id) == "FINISHED"
    assert list(statuses.values()) in (["KILLED"], ["FAILED"])
