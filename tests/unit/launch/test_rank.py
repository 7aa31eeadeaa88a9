"""What one rank does beside training: it ends with its parent, and speaks in lines."""

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


# Its threads log while it sends events, as the one of the metrics does.
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
def test_the_lines_of_all_ranks_are_logged_on_request(rank: int, distributed: DistributedConfig, level: int) -> None:
    """Else rank 0's, and the warnings of the others."""
    assert log_level(rank, distributed) == level


def test_whose_lines_are_logged_makes_no_other_training() -> None:
    """A finished one is found again."""
    train, cache = TrainConfig(weights="none", freeze_backbone=False), CacheRef(url="/nowhere", digest="none")
    keys = {run_key(train, cache, DistributedConfig(log_ranks=ranks)) for ranks in ("rank0", "all")}
    assert len(keys) == 1


@pytest.mark.timeout(60)
def test_orphaned_rank_ends() -> None:
    """The parent is killed, without a chance to say anything: the rank, in a session of its own, is gone too."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, RANK], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        rank = psutil.Process(int(parent.stdout.readline()))
        assert rank.is_running()

        parent.kill()
        parent.wait()

        # The rank inherited the other end of this pipe: its end is the end of the rank.
        assert parent.stdout.read() == ""
    rank.wait(timeout=30)
    assert not rank.is_running()


@pytest.mark.timeout(60)
def test_orphaned_rank_has_a_status_of_its_own() -> None:
    """A rank that was left alone can be told from one that failed, and lives until then."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RANK], **pipes) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdout.readline()
        assert rank.poll() is None

        rank.stdin.close()

        assert rank.wait(timeout=30) == EXIT_ORPHANED


def test_event_is_one_marked_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What the launcher reads is JSON after the mark, on a line of its own, whatever is in it."""
    event = {"epoch": 1, "val_accuracy": 0.5, "text": "zwei\nZeilen"}

    emit(event)

    line = capsys.readouterr().out
    assert line.startswith(EVENT_MARK)
    assert line.count("\n") == 1
    assert json.loads(line.removeprefix(EVENT_MARK)) == event


def test_events_stay_whole_while_threads_log() -> None:
    """Output and errors are one pipe, and a rank writes both at once without a buffer."""
    command = [sys.executable, "-u", "-c", LOUD_RANK]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    lines = said.stdout.splitlines()
    events = [json.loads(line.removeprefix(EVENT_MARK)) for line in lines if line.startswith(EVENT_MARK)]
    assert events == [{"number": number} for number in range(3000)]
    assert {line for line in lines if not line.startswith(EVENT_MARK)} == {"a line of a log"}


def test_spec_comes_back_from_its_file(tmp_path: Path) -> None:
    """What the launcher writes is what the rank reads, and a name that no rank knows is refused."""
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
        TrainingSpec.model_validate(json.loads(text) | {"surprise": 1})


def test_single_process_is_one_rank_without_horovod() -> None:
    """One rank needs no one to agree with."""
    reducer = make_reducer(1)

    assert isinstance(reducer, SingleProcess)
    assert (reducer.rank, reducer.num_ranks) == (0, 1)
    assert reducer.broadcast("value") == "value"


def test_what_keeps_ranks_off_the_gpus_is_said_with_the_way_out() -> None:
    """A build without NCCL, and more ranks than GPUs."""
    assert gpu_obstacle(nccl_built=True, num_ranks=2, num_gpus=2) is None
    assert "HOROVOD_GPU_OPERATIONS=NCCL make setup" in str(gpu_obstacle(nccl_built=False, num_ranks=2, num_gpus=2))
    assert "distributed.num_ranks is 2 and there are 1 GPUs" in str(
        gpu_obstacle(nccl_built=True, num_ranks=2, num_gpus=1)
    )
