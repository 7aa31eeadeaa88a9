"""Rank processes: exit with the parent, events on their own pipe, logging and specification."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from tasks.collectives.reducer import Reducer
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.launch.protocol import ACTIVITY, Reporter
from tasks.launch.rank import log_level, make_reducer
from tasks.launch.start_rank import EXIT_ORPHANED
from tasks.progress.activity import Activity
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.system.cores import gpu_obstacle
from tasks.train.spec import TrainingSpec, decisive_settings, run_key

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


# A rank that sends events while its activity and unfinished lines of output are written, and then stops.
LOUD_RANK = """
import os, sys, time
from tasks.launch.protocol import Reporter
from tasks.progress.activity import stepping
reporter = Reporter(int(sys.argv[1]))
reporter.start()
with stepping("training", 2) as begin_step:
    for number in range(3000):
        begin_step(number)
        sys.stdout.write("an unfinished line")
        reporter.send({"number": number, "text": "zwei\\nZeilen" * 30})
    time.sleep(1.5)
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


def test_key_depends_on_what_changes_the_result() -> None:
    """Backend, compression and synchronized batch norm make another run; runs without them keep their keys."""
    train, cache = TrainConfig(weights="none", freeze_backbone=False), CacheRef(url="/nowhere", digest="none")
    configs = [
        {},
        {"backend": "torch"},
        {"gradient_compression": "fp16"},
        {"sync_batch_norm": True},
        {"backend": "torch", "gradient_compression": "bf16"},
    ]
    keys = [run_key(train, cache, DistributedConfig.model_validate(config)) for config in configs]

    assert len(set(keys)) == len(configs)
    assert decisive_settings(train, cache, DistributedConfig(), None)["ranks"] == {"num_ranks": 2}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_stopped", [False, True])
def test_orphaned_rank_exits(is_stopped: bool) -> None:
    """A rank in its own session exits when its parent is killed, also while it is stopped."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, RANK], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        rank = psutil.Process(int(parent.stdout.readline()))
        assert rank.is_running()
        if is_stopped:
            rank.suspend()

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


@pytest.mark.timeout(60)
def test_events_and_activity_are_whole_lines_apart_from_the_output() -> None:
    """All events arrive in order, also while the pipe is full, and the last activity is that of the last step."""
    events, to_events = os.pipe()
    rank = subprocess.Popen(
        [sys.executable, "-c", LOUD_RANK, str(to_events)], stdout=subprocess.DEVNULL, pass_fds=(to_events,)
    )
    os.close(to_events)
    with os.fdopen(events) as pipe:
        time.sleep(1)  # The events fill the pipe meanwhile.
        received = [json.loads(line) for line in pipe]
    assert rank.wait() == 0
    sent = [event for event in received if ACTIVITY not in event]
    assert sent == [{"number": number, "text": "zwei\nZeilen" * 30} for number in range(3000)]
    activities = [Activity(*event[ACTIVITY]) for event in received if ACTIVITY in event]
    assert activities[-1].place == "step 2999 of epoch 2 (training)"


def test_rank_reports_until_its_launcher_has_ended() -> None:
    """An event that nobody reads raises nothing: the rank exits with its launcher."""
    events, to_events = os.pipe()
    os.close(events)
    Reporter(to_events).send({"epoch": 1})
    os.close(to_events)


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


@pytest.mark.parametrize(
    "distributed", [None, DistributedConfig(num_ranks=1), DistributedConfig(num_ranks=2, backend="torch")]
)
def test_one_rank_is_a_single_process(distributed: DistributedConfig | None) -> None:
    """A single rank has the reducer of a single process, whatever the backend."""
    reducer = make_reducer(1, distributed)

    assert type(reducer) is Reducer
    assert (reducer.rank, reducer.num_ranks) == (0, 1)


def test_gpu_obstacle_has_cause_and_remedy() -> None:
    """The reason is a build without NCCL or more ranks than GPUs, with its remedy."""
    for backend, remedy in (
        ("horovod", "HOROVOD_GPU_OPERATIONS=NCCL make setup"),
        ("torch", "torch was built without NCCL: install its build for CUDA"),
    ):
        assert gpu_obstacle(backend, has_nccl=True, num_ranks=2, num_gpus=2) is None
        assert remedy in str(gpu_obstacle(backend, has_nccl=False, num_ranks=2, num_gpus=2))
        too_many = gpu_obstacle(backend, has_nccl=True, num_ranks=2, num_gpus=1)
        assert "2 ranks share this machine and there are 1 GPUs" in str(too_many)
