"""Checks before ranks start, and their environment and events."""

import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import filelock
import psutil
import pytest

# launch_ranks loads it in a thread, unless it is loaded: where two threads parse code at a time, as pytest does, too,
# Python before 3.11.8 raises "AST constructor recursion depth mismatch".
import tasks.tracking.runs  # noqa: F401  # loaded for later
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import RankStalled, TimeLimitExceeded, WrongInput
from tasks.launch import rank_process
from tasks.launch.launcher import launch_ranks
from tasks.launch.restarts import RanksLost, Stopped
from tasks.progress.count import StepProgress, listener
from tasks.refs import TEST, TRAIN, VAL, CacheRef
from tasks.storage import Storage
from tasks.system import cores
from tasks.system.signals import interrupt_on
from tasks.system.slots import Slot
from tasks.train.checkpoint_files import launch_lock
from tasks.train.spec import TrainingSpec

FROM_SCRATCH = TrainConfig(weights="none", freeze_backbone=False, timeout_seconds=1)


def spec_of(train: TrainConfig, cache: CacheRef, storage: Storage, num_ranks: int | None = None) -> TrainingSpec:
    """Return a specification; `num_ranks` None is a single process."""
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks)
    return TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage)


@pytest.mark.parametrize(
    ("num_ranks", "steps", "message"),
    [
        (3, 16, r"^train.accumulate_steps is 16, but the split 'train' has 45 images, .* at most 15$"),
        (46, 1, r"^distributed.num_ranks is 46, but the split 'train' has 45 images: give at most 45$"),
    ],
)
def test_more_ranks_or_parts_of_a_step_than_images_are_rejected_before_ranks_start(
    make_cache: Callable[..., CacheRef], storage: Storage, num_ranks: int, steps: int, message: str
) -> None:
    """Both are rejected before the lock is acquired."""
    train = FROM_SCRATCH.model_copy(update={"accumulate_steps": steps})
    with pytest.raises(WrongInput, match=message):
        launch_ranks(spec_of(train, make_cache({TRAIN: 45, VAL: 9, TEST: 9}), storage, num_ranks))
    assert not Path(storage.home).exists()


def test_waiting_for_the_same_run_times_out(storage: Storage) -> None:
    """Waiting for a process with the same run ends with TimeLimitExceeded, or with Stopped once `stop` is set."""
    spec = spec_of(FROM_SCRATCH, CacheRef(url="/nowhere", digest="d" * 64), storage)
    storage.checkpoints.mkdir(parents=True)
    stop = threading.Event()
    with filelock.FileLock(launch_lock(storage.checkpoints / spec.key)):
        with pytest.raises(TimeLimitExceeded, match="train.timeout_seconds 1:") as refused:
            launch_ranks(spec)
        assert refused.value.setting == "train.timeout_seconds"
        stop.set()
        with pytest.raises(Stopped):
            launch_ranks(spec, stop=stop)


def fake_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let launchers start a program instead of training, in which `send` sends an event."""
    rank = folder / "rank"
    rank.write_text(f"""#!{sys.executable}
import json, os, signal, sys, time
from dataclasses import asdict
descriptor, number = int(sys.argv[-2]), int(os.environ.get("HOROVOD_RANK", "0"))
def send(event):
    os.write(descriptor, f"{{json.dumps(event)}}\\n".encode())
def step(number):
    send({{"activity": ["training", "step", 2, number, number]}})
{program}
""")
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))


@pytest.mark.parametrize(
    ("slot", "num_slots", "resources"),
    [
        (None, 1, "8 threads, GPU-a"),
        (1, 1, "8 threads, GPU-b"),
        (0, 3, "2 threads, GPU-a"),
        (1, 3, "2 threads, GPU-b"),
        (2, 3, "2 threads, GPU-a"),
    ],
)
def test_concurrent_runs_share_cores_and_gpus(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: int | None, num_slots: int, resources: str
) -> None:
    """They share the cores, and have the GPU of their slot, whose lock they inherit, or the first free one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    resources_of_rank = 'f\'{os.environ["OMP_NUM_THREADS"]} threads, {os.environ["CUDA_VISIBLE_DEVICES"]}\''
    path = tmp_path / "slot.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    inherited = "" if slot is None else f'assert os.readlink("/proc/self/fd/{lock}") == {str(path)!r}\n'
    fake_ranks(tmp_path, monkeypatch, f'{inherited}send({{"run_id": {resources_of_rank}}})')
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    train = TrainConfig(weights="none", freeze_backbone=False)
    cache = CacheRef(url="cache", digest="digest")

    taken = None if slot is None else Slot(slot, lock)
    try:
        run = launch_ranks(
            TrainingSpec(train=train, distributed=None, cache=cache, storage=storage, slot=taken, num_slots=num_slots)
        )
    finally:
        os.close(lock)

    assert run.run_id == resources


def test_progress_of_ranks_is_reported_in_this_process(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress events of a rank reach the listeners in the launcher's process."""
    progress = StepProgress("features", 64, 150, 2.0)
    fake_ranks(tmp_path, monkeypatch, f"send({asdict(progress)})\nsend({{'run_id': 'r'}})")
    train = TrainConfig(weights="none", freeze_backbone=False)
    reports: list[StepProgress] = []

    with listener(reports.append):
        launch_ranks(spec_of(train, CacheRef(url="cache", digest="digest"), storage))

    assert reports == [progress]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks_of_runs", [(2, 2), (2, None, None)])
def test_concurrent_runs_have_different_gpus(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks_of_runs: tuple[int | None, ...]
) -> None:
    """Each rank or single process has one of four GPUs, and ranks see those of their run; on the CPU none is taken."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    # Each run waits until the other one has started.
    program = f"""
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
folder = {str(tmp_path)!r}
open(f"{{folder}}/{{gpus}}-{{number}}.started", "w").close()
while len([name for name in os.listdir(folder) if name.endswith(".started")]) < 4:
    time.sleep(0.05)
if number == 0:
    send({{"run_id": gpus}})
"""
    fake_ranks(tmp_path, monkeypatch, program)

    def launch(seed: int, num_ranks: int | None) -> list[str]:
        train = TrainConfig(weights="none", freeze_backbone=False, seed=seed)
        return launch_ranks(spec_of(train, FAKE_CACHE, storage, num_ranks)).run_id.split(",")

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(launch, itertools.count(1), ranks_of_runs))
    assert [len(gpus) for gpus in found] == [num_ranks or 1 for num_ranks in ranks_of_runs]
    assert sorted(itertools.chain(*found)) == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]

    on_cpu = TrainConfig(weights="none", freeze_backbone=False, device="cpu")
    assert launch_ranks(spec_of(on_cpu, FAKE_CACHE, storage, 2)).run_id == "GPU-a,GPU-b,GPU-c,GPU-d"


FAKE_CACHE = CacheRef(url="cache", digest="digest")


def launch_two(storage: Storage, max_restarts: int = 0) -> str:
    """Launch two ranks with the least limit; return the id of the run."""
    distributed = DistributedConfig(num_ranks=2, stall_timeout_seconds=10, max_restarts=max_restarts)
    train = TrainConfig(weights="none", freeze_backbone=False)
    return launch_ranks(TrainingSpec(train=train, distributed=distributed, cache=FAKE_CACHE, storage=storage)).run_id


def test_event_after_an_unfinished_line_is_not_lost(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Output and events have a pipe each."""
    fake_ranks(tmp_path, monkeypatch, "print('half a line', end='', flush=True)\nsend({'run_id': 'r'})")
    with caplog.at_level("INFO", "lakevision.ranks"):
        run = launch_ranks(spec_of(TrainConfig(weights="none", freeze_backbone=False), FAKE_CACHE, storage))
    assert run.run_id == "r"
    assert caplog.messages == ["rank 0: half a line"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("hang", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "has reported nothing for 1. s, since"),
        ("while 'endless': step(14); time.sleep(0.5)", "has made no progress for 1. s, in"),
    ],
)
def test_stopped_or_endless_rank_ends_all_ranks(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hang: str,
    message: str,
    num_ranks: int,
) -> None:
    """The error names the rank and its step, the log has its stack if it runs, and no process is left.

    A single process has the same watchdog.
    """
    program = f"""
import faulthandler
faulthandler.register(signal.SIGUSR1, file=sys.stdout)
step(14)
open({str(tmp_path)!r} + f"/pid-{{number}}", "w").write(str(os.getpid()))
if number == {num_ranks - 1}:
    {hang}
for seconds in range(1000):
    send({{"activity": ["training", "ranks", 2, 14, 15]}})
    time.sleep(0.5)
"""
    fake_ranks(tmp_path, monkeypatch, program)
    alone = TrainConfig(weights="none", freeze_backbone=False, stall_timeout_seconds=10)
    launch = (
        partial(launch_two, storage) if num_ranks == 2 else partial(launch_ranks, spec_of(alone, FAKE_CACHE, storage))
    )
    with (
        caplog.at_level("INFO", "lakevision.ranks"),
        pytest.raises(RankStalled, match=rf"^rank {num_ranks - 1} {message} step 14 of epoch 2 ") as stalled,
    ):
        launch()
    assert stalled.value.setting == f"{'train' if num_ranks == 1 else 'distributed'}.stall_timeout_seconds"
    stacks = [line for line in caplog.messages if "(most recent call first)" in line]
    assert [line.partition(":")[0] for line in stacks] == ([f"rank {num_ranks - 1}"] if "endless" in hang else [])
    assert [path.name for path in sorted(tmp_path.glob("pid-*")) if psutil.pid_exists(int(path.read_text()))] == []


@pytest.mark.timeout(120)
def test_killed_rank_is_named_and_not_the_one_that_failed_for_it(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank may end first, with an error about a closed connection."""
    program = """
if number == 0:
    sys.exit("connection closed by peer")
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    fake_ranks(tmp_path, monkeypatch, program)
    monkeypatch.setattr(rank_process, "KERNEL_COUNTERS", tmp_path / "none")  # Another test may be out of memory.
    with pytest.raises(RanksLost, match=r"^rank 1 was ended by signal 9; its last lines:\n$"):
        launch_two(storage)


@pytest.mark.timeout(120)
def test_error_of_a_rank_is_raised_after_its_last_lines_are_logged(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Events come by another pipe than output, and may arrive before it."""
    program = """
send({"failed": {"kind": "WrongInput", "message": "train.lr is 1", "setting": "train.lr", "way_out": ""}})
if number == 0:
    print("the last line", flush=True)
    os._exit(2)
time.sleep(60)
"""
    fake_ranks(tmp_path, monkeypatch, program)
    with caplog.at_level("INFO", "lakevision.ranks"), pytest.raises(WrongInput, match=r"^train.lr is 1$"):
        launch_two(storage)
    assert "rank 0: the last line" in caplog.messages


@pytest.mark.timeout(120)
def test_end_of_ranks_is_not_interrupted_by_a_second_signal(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that sees a cancellation late sends its signal while the ranks write their checkpoint."""
    program = f"""
def end(*_):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(2)
    open({str(tmp_path)!r} + f"/saved-{{number}}", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open({str(tmp_path)!r} + f"/started-{{number}}", "w").close()
while not os.path.exists({str(tmp_path)!r} + "/started-1"):
    time.sleep(0.05)
if number == 0:
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    fake_ranks(tmp_path, monkeypatch, program)
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            launch_two(storage)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in sorted(tmp_path.glob("saved-*"))] == ["saved-0", "saved-1"]


@pytest.mark.timeout(120)
def test_killed_rank_is_started_again(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ranks start again, under the same lock, and only the second start has a result."""
    program = f"""
marker = {str(tmp_path)!r} + f"/started-{{number}}"
if not os.path.exists(marker):
    open(marker, "w").close()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if number == 0:
    send({{"run_id": "second"}})
"""
    fake_ranks(tmp_path, monkeypatch, program)
    with caplog.at_level("INFO", "lakevision.ranks"):
        assert launch_two(storage, max_restarts=1) == "second"
    assert "rank 1 was ended by signal 9: restarting 2 ranks from the start (restart 1 of 1)" in caplog.messages
