"""Start the ranks of a training on this machine, watch them, and end them all together."""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import filelock

from tasks.cache.manifest import read_manifest
from tasks.environment import rank_environment
from tasks.errors import USER_ERRORS, OutOfTime
from tasks.launch.protocol import EVENT_MARK, EXIT_ENDED
from tasks.launch.rendezvous import ranks_environments
from tasks.progress.count import Standing, tell
from tasks.refs import RunRef
from tasks.system.cores import num_cores, share_of_gpus
from tasks.train.batches import check_data
from tasks.train.spec import TrainingSpec
from tasks.train.sweep import launch_lock

logger = logging.getLogger("lakevision.ranks")

LEAVE_GRACE_SECONDS = 25.0
"""How long ranks may take to write their checkpoint and leave after SIGTERM before they get SIGKILL.

Prefect kills the process of a cancelled run 30 s after SIGTERM: by then it must have said how the run ended."""

FAILED_GRACE_SECONDS = 5.0
"""The same where a rank has failed: the others wait for it in a step that never ends."""

LOOK_SECONDS = 0.5
"""Between two looks at whether the training is to be ended."""

LAST_LINES = 30
"""Lines of a failed rank's output that its error carries."""


class RankFailed(RuntimeError):
    """A rank ended with an error; the others were ended with it."""


class Stopped(RuntimeError):
    """The training was ended by whoever asked for it; run again, and it goes on from its last checkpoint."""


@dataclass
class _Rank:
    number: int
    process: "subprocess.Popen[str]"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def _start(number: int, spec_path: Path, environment: dict[str, str]) -> _Rank:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tasks.launch.start_rank", str(spec_path)],
        # Nothing is ever written: the pipe closes when this process ends, and the rank with it.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        # A session of its own: Ctrl-C on the terminal reaches the ranks through this process, in order.
        start_new_session=True,
    )
    return _Rank(number, process)


def _read_lines(rank: _Rank, lines: "queue.Queue[tuple[_Rank, str | None]]") -> None:
    assert rank.process.stdout is not None
    with rank.process.stdout as said:
        for line in said:
            lines.put((rank, line.rstrip("\n")))
    lines.put((rank, None))


def _end(ranks: list[_Rank], grace_seconds: float) -> None:
    """End every rank that still runs, and wait until none is left."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.process.terminate()
    deadline = time.monotonic() + grace_seconds
    for rank in running:
        try:
            rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    for rank in ranks:
        assert rank.process.stdin is not None
        rank.process.stdin.close()


def launch_ranks(
    spec: TrainingSpec,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    stop: threading.Event | None = None,
) -> RunRef:
    """Train with the ranks that `spec` asks for, on this machine, and return the MLflow run that rank 0 made.

    The first rank that fails ends all; when this process ends, by any signal, the ranks end with it.

    Args:
        spec: What to train.
        on_event: Called with each event of rank 0: epoch (the number of epochs trained), max_epochs, ends_training
            (whether no epoch follows), val_accuracy, and the name and value of the metric that `train.monitor` names.
            What it raises ends the ranks.
        stop: Ends the ranks when it is set; for who trains in a thread, which no signal reaches.

    Raises:
        WrongInput: More ranks or a larger batch than there are images, a rank refused its input, or diverged.
        DiskFull: A disk was full.
        TrackingAway, RunDeleted: The tracking server does not answer, or the MLflow run is not there any more.
        RankFailed: A rank failed otherwise; carries its last lines.
        OutOfTime: It took longer than `train.timeout_seconds`, or another process that trains the same did.
        Stopped: `stop` was set.
    """
    manifest = read_manifest(spec.cache.url)
    if manifest is not None:  # Of a cache that is gone the ranks say so.
        check_data(spec.train, manifest, spec.num_ranks)
    lock = launch_lock(spec.storage.checkpoints / spec.key)
    lock.parent.mkdir(parents=True, exist_ok=True)
    # Two that want the same training: the second waits here, where no rank waits for another, and finds it done.
    turn = filelock.FileLock(lock)
    try:
        turn.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process trains exactly this: waiting for its result")
        _wait_for_turn(turn, spec.train.timeout_seconds, stop)
    try:
        return _train(spec, on_event, stop)
    finally:
        turn.release()


def _wait_for_turn(turn: filelock.BaseFileLock, timeout_seconds: int, stop: threading.Event | None) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with suppress(filelock.Timeout):
            turn.acquire(timeout=LOOK_SECONDS)
            return
        _check_stop(stop)
    raise OutOfTime(
        f"another process trains exactly this, and has not ended within train.timeout_seconds {timeout_seconds}: "
        "wait for it or end it, then run again"
    )


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped("the training was ended before its end: run again, and it goes on from its last checkpoint")


def _train(
    spec: TrainingSpec, on_event: Callable[[dict[str, Any]], None] | None, stop: threading.Event | None
) -> RunRef:
    num_ranks = spec.num_ranks
    lines: queue.Queue[tuple[_Rank, str | None]] = queue.Queue()
    ranks: list[_Rank] = []
    run_id: str | None = None
    with (
        TemporaryDirectory() as scratch,
        ranks_environments(num_ranks) as environments,
    ):
        spec_path = Path(scratch, "spec.json")
        spec_path.write_text(spec.model_dump_json())
        common = rank_environment() | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(spec.train.num_threads or max(1, num_cores() // (num_ranks * spec.num_slots))),
        }
        if spec.num_slots > 1:
            common |= share_of_gpus(spec.slot)
        if spec.distributed:
            common["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(spec.distributed.stall_timeout_seconds)
        try:
            for number, own in enumerate(environments):
                ranks.append(_start(number, spec_path, common | own))
                threading.Thread(target=_read_lines, args=(ranks[-1], lines), daemon=True).start()
            running = len(ranks)
            deadline = time.monotonic() + spec.train.timeout_seconds
            while running:
                rank, line = _next_line(lines, deadline, spec.train.timeout_seconds, stop)
                if line is None:
                    running -= 1
                    _check_exit(rank)
                elif line.startswith(EVENT_MARK):
                    event = json.loads(line.removeprefix(EVENT_MARK))
                    if "failed" in event:
                        raise USER_ERRORS[event["failed"]](event["said"])
                    if "step" in event:
                        tell(Standing(**event))
                    run_id = event.get("run_id", run_id)
                    if on_event is not None and "epoch" in event:
                        on_event(event)
                else:
                    rank.lines.append(line)
                    logger.info("rank %d: %s", rank.number, line)
        finally:
            # Where one was asked to leave, rank 0 writes a checkpoint of all, and they leave.
            failed = any(rank.process.poll() not in (None, 0, EXIT_ENDED) for rank in ranks)
            _end(ranks, FAILED_GRACE_SECONDS if failed else LEAVE_GRACE_SECONDS)
    if run_id is None:
        raise RankFailed("the ranks ended without an error and without a result: their lines are in the log")
    return RunRef(run_id=run_id)


def _next_line(
    lines: "queue.Queue[tuple[_Rank, str | None]]", deadline: float, timeout_seconds: int, stop: threading.Event | None
) -> tuple[_Rank, str | None]:
    while (left := deadline - time.monotonic()) > 0:
        _check_stop(stop)
        with suppress(queue.Empty):
            return lines.get(timeout=min(left, LOOK_SECONDS))
    raise OutOfTime(
        f"the training took longer than train.timeout_seconds {timeout_seconds} and was ended: "
        "run again, and it goes on from its last checkpoint"
    )


def _check_exit(rank: _Rank) -> None:
    status = rank.process.wait()
    if status != 0:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RankFailed(f"rank {rank.number} {how}; its last lines:\n" + "\n".join(rank.lines))
