"""Rank processes: exit with the parent, events on stdout, logging and specification."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from tasks.collectives import SingleProcess
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.launch.protocol import EVENT_MARK
from tasks.launch.rank import emit, gpu_obstacle, log_level, make_reducer
from tasks.launch.start_rank import EXIT_ORPHANED
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.identity import run_key
from tasks.train.spec import TrainingSpec

# A rank that sleeps instead of training.
RANK = """
import os, time
from tasks.launch.start_rank import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(300)
"""

PARENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(300)
"""


# A rank whose thread logs while it sends events, as the thread that sends metrics does.
LOUD_RANK = """
import logging, sys, threading
from tasks.launch.rank import emit
logging.basicConfig(stream=sys.stderr, format="%(message)s")
def log():
    while not over.is_set():
        logging.warning("a line of a log")
over = threading.Event()
thread = threading.Thread(target=log)
thread.start()
for number in range(3000):
    emit({"number": number})
over.set()
thread.join()
"""


@pytest.mark.parametrize(
    ("rank", "distributed", "level"),
    [
        (0, None, logging.INFO),
        (0, DistributedConfig(), logging.INFO),
        (1, DistributedConfig(), logging.WARNING),
        (1, DistributedConfig(log_ranks="all"), logging.INFO),
    ],
)
def test_log_level_depends_on_rank_and_log_ranks(rank: int, distributed: DistributedConfig, level: int) -> None:
    """Rank 0 logs all lines, and other ranks only warnings unless log_ranks is all."""
    assert log_level(rank, distributed) == level


def test_key_does_not_depend_on_log_ranks() -> None:
    """The setting log_ranks does not change the key of a run."""
    train, cache = TrainConfig(weights="none", freeze_backbone=False), CacheRef(url="/nowhere", digest="none")
    keys = {run_key(train, cache, DistributedConfig(log_ranks=ranks)) for ranks in ("rank0", "all")}
    assert len(keys) == 1


@pytest.mark.timeout(60)
def test_orphaned_rank_exits() -> None:
    """A rank in its own session exits when its parent is killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, RANK], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        rank = psutil.Process(int(parent.stdout.readline()))
        assert rank.is_running()

        parent.kill()
        parent.wait()

        # The rank inherited the other end of this pipe, which closes when the rank exits.
        assert parent.stdout.read() == ""
    rank.wait(timeout=30)
    assert not rank.is_running()


@pytest.mark.timeout(60)
def test_orphaned_rank_has_its_own_exit_status() -> None:
    """A rank runs until its parent closes stdin, and then exits with EXIT_ORPHANED."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RANK], **pipes) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdout.readline()
        assert rank.poll() is None

        rank.stdin.close()

        assert rank.wait(timeout=30) == EXIT_ORPHANED


def test_event_is_one_line_with_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """An event is JSON after EVENT_MARK on one line, even if a value has a newline."""
    event = {"epoch": 1, "val_accuracy": 0.5, "text": "zwei\nZeilen"}

    emit(event)

    line = capsys.readouterr().out
    assert line.startswith(EVENT_MARK)
    assert line.count("\n") == 1
    assert json.loads(line.removeprefix(EVENT_MARK)) == event


def test_events_are_intact_while_threads_log() -> None:
    """Events stay on their own lines while a thread logs to the same unbuffered pipe."""
    command = [sys.executable, "-u", "-c", LOUD_RANK]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    lines = finished.stdout.splitlines()
    events = [json.loads(line.removeprefix(EVENT_MARK)) for line in lines if line.startswith(EVENT_MARK)]
    assert events == [{"number": number} for number in range(3000)]
    assert {line for line in lines if not line.startswith(EVENT_MARK)} == {"a line of a log"}


def test_spec_is_unchanged_after_serialization(tmp_path: Path) -> None:
    """A rank reads the specification that the launcher wrote, and unknown fields are rejected."""
    spec = TrainingSpec(
        train=TrainConfig(model="resnet18"),
        distributed=DistributedConfig(num_ranks=3),
        cache=CacheRef(url="/cache", digest="d"),
        storage=Storage(home=str(tmp_path), tables="t", cache="c", artifacts="a", tracking="m"),
        tags={"prefect.flow_run_id": "1"},
    )
    text = spec.model_dump_json()

    assert TrainingSpec.model_validate_json(text) == spec
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TrainingSpec.model_validate(json.loads(text) | {"unknown": 1})


def test_single_process_is_one_rank_without_horovod() -> None:
    """A single rank has the reducer of a single process."""
    reducer = make_reducer(1)

    assert isinstance(reducer, SingleProcess)
    assert (reducer.rank, reducer.num_ranks) == (0, 1)
    assert reducer.broadcast("value") == "value"


def test_gpu_obstacle_has_cause_and_remedy() -> None:
    """The reason is a build without NCCL or more ranks than GPUs, with its remedy."""
    assert gpu_obstacle(nccl_built=True, num_ranks=2, num_gpus=2) is None
    assert "HOROVOD_GPU_OPERATIONS=NCCL make setup" in str(gpu_obstacle(nccl_built=False, num_ranks=2, num_gpus=2))
    assert "distributed.num_ranks is 2 and there are 1 GPUs" in str(
        gpu_obstacle(nccl_built=True, num_ranks=2, num_gpus=1)
    )
