"""Launcher of the ranks of a training run on this machine, which end together."""

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
from tasks.errors import USER_ERRORS, TimeLimitExceeded
from tasks.launch.protocol import EVENT_MARK, EXIT_ENDED
from tasks.launch.rendezvous import ranks_environments
from tasks.progress.count import StepProgress, publish
from tasks.refs import RunRef
from tasks.system.cores import num_cores, share_of_gpus
from tasks.train.batches import check_data
from tasks.train.spec import TrainingSpec
from tasks.train.sweep import launch_lock

logger = logging.getLogger("lakevision.ranks")

SHUTDOWN_GRACE_SECONDS = 25.0
"""Seconds that ranks have after SIGTERM to write their checkpoint and exit before they get SIGKILL.

Prefect kills the process of a cancelled run 30 s after SIGTERM, and the state of the run must be reported by then."""

FAILED_GRACE_SECONDS = 5.0
"""The same after a rank has failed, when the others wait for it in a step that never ends."""

POLL_SECONDS = 0.5
"""Seconds between two checks of `stop`."""

LAST_LINES = 30
"""Lines of a failed rank's output in its error."""


class RankFailed(RuntimeError):
    """A rank failed, and the others were terminated."""


class Stopped(RuntimeError):
    """The training run was stopped by its caller; run again to resume from the last checkpoint."""


@dataclass
class _Rank:
    number: int
    process: "subprocess.Popen[str]"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def _start(number: int, spec_path: Path, environment: dict[str, str]) -> _Rank:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tasks.launch.start_rank", str(spec_path)],
        # Never written to: the pipe closes when this process ends, and then the rank exits.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        # Its own session, so that Ctrl-C on the terminal reaches the ranks only through this process.
        start_new_session=True,
    )
    return _Rank(number, process)


def _read_lines(rank: _Rank, lines: "queue.Queue[tuple[_Rank, str | None]]") -> None:
    assert rank.process.stdout is not None
    with rank.process.stdout as output:
        for line in output:
            lines.put((rank, line.rstrip("\n")))
    lines.put((rank, None))


def _terminate(ranks: list[_Rank], grace_seconds: float) -> None:
    """Terminate all running ranks, on a cancel, failure or timeout, and wait until they have ended."""
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
    """Train with the ranks of `spec` on this machine, and return the MLflow run of rank 0.

    If a rank fails, all ranks are terminated. If this process ends, by any signal, the ranks exit.

    Args:
        spec: Specification of the training run.
        on_event: Called with each event of rank 0: epoch (the number of epochs trained), max_epochs, ends_training
            (whether it was the last epoch), val_accuracy, and monitor and value (the metric `train.monitor`). An
            exception in it terminates the ranks.
        stop: Terminates the ranks when it is set; for callers in a thread, which signals do not reach.

    Raises:
        WrongInput: There are fewer images than ranks or than a global batch, a rank rejected its input, or diverged.
        DiskFull: A disk is full.
        TrackingUnavailable, RunDeleted: The tracking server does not answer, or the MLflow run was deleted.
        RankFailed: A rank failed for another reason; the message has its last lines.
        TimeLimitExceeded: Training exceeded `train.timeout_seconds`, here or in another process with the same run.
        Stopped: `stop` was set.
    """
    manifest = read_manifest(spec.cache.url)
    if manifest is not None:  # A missing cache is reported by the ranks.
        check_data(spec.train, manifest, spec.num_ranks)
    lock_path = launch_lock(spec.storage.checkpoints / spec.key)
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    # A second process with the same run waits here, before its ranks start, and then finds the run finished.
    lock = filelock.FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process is training the same run: waiting for its result")
        _wait_for_lock(lock, spec.train.timeout_seconds, stop)
    try:
        return _train(spec, on_event, stop)
    finally:
        lock.release()


def _wait_for_lock(lock: filelock.BaseFileLock, timeout_seconds: int, stop: threading.Event | None) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with suppress(filelock.Timeout):
            lock.acquire(timeout=POLL_SECONDS)
            return
        _check_stop(stop)
    raise TimeLimitExceeded(
        f"another process is training the same run, and has not ended within train.timeout_seconds {timeout_seconds}: "
        "wait for it or end it, then run again"
    )


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped("training was stopped: run again to resume from the last checkpoint")


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
        common = rank_environment(spec.train.environment) | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(spec.train.num_threads or max(1, num_cores() // (num_ranks * spec.num_slots))),
        }
        if unset := [name for name in spec.train.environment if name not in common]:
            logger.warning("train.environment names '%s', which is not set where the ranks start", "', '".join(unset))
        if spec.num_slots > 1:
            common |= share_of_gpus(spec.slot)
        if spec.distributed:
            common["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(spec.distributed.stall_timeout_seconds)
        try:
            for number, environment in enumerate(environments):
                ranks.append(_start(number, spec_path, common | environment))
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
                        raise USER_ERRORS[event["failed"]](event["message"])
                    if "step" in event:
                        publish(StepProgress(**event))
                    run_id = event.get("run_id", run_id)
                    if on_event is not None and "epoch" in event:
                        on_event(event)
                else:
                    rank.lines.append(line)
                    logger.info("rank %d: %s", rank.number, line)
        finally:
            # If no rank has failed, they write a checkpoint together and exit.
            failed = any(rank.process.poll() not in (None, 0, EXIT_ENDED) for rank in ranks)
            _terminate(ranks, FAILED_GRACE_SECONDS if failed else SHUTDOWN_GRACE_SECONDS)
    if run_id is None:
        raise RankFailed("the ranks ended without an error and without a result: their output is in the log")
    return RunRef(run_id=run_id)


def _next_line(
    lines: "queue.Queue[tuple[_Rank, str | None]]", deadline: float, timeout_seconds: int, stop: threading.Event | None
) -> tuple[_Rank, str | None]:
    while (remaining := deadline - time.monotonic()) > 0:
        _check_stop(stop)
        with suppress(queue.Empty):
            return lines.get(timeout=min(remaining, POLL_SECONDS))
    raise TimeLimitExceeded(
        f"training took longer than train.timeout_seconds {timeout_seconds} and was stopped: "
        "run again to resume from the last checkpoint"
    )


def _check_exit(rank: _Rank) -> None:
    status = rank.process.wait()
    if status != 0:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RankFailed(f"rank {rank.number} {how}; its last lines:\n" + "\n".join(rank.lines))
