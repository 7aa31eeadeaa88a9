"""Launcher of the ranks of a training run, on this machine or on several hosts, which end together."""

import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import filelock

from tasks.cache.manifest import read_manifest
from tasks.errors import RankStalled, TimeLimitExceeded, loggable, restored_error
from tasks.launch.gpus import choose_backend, gpus_of_run
from tasks.launch.places import open_places
from tasks.launch.protocol import EXIT_ENDED
from tasks.launch.rank_process import Message, RankOutput, RankProcess, first_failed, terminate
from tasks.launch.rendezvous import place_ranks, rank_variables
from tasks.launch.restarts import LOSSES, Deadline, RankFailed, RanksLost, Stopped, train_with_restarts
from tasks.launch.watchdog import Watchdog
from tasks.progress.count import StepProgress, publish
from tasks.refs import RunRef
from tasks.system.locks import lock_if_free
from tasks.system.signals import run_uninterrupted
from tasks.system.slots import Gpus
from tasks.train.batches import check_data
from tasks.train.checkpoint_files import launch_lock, training_lock
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

SHUTDOWN_GRACE_SECONDS = 8.0
"""Seconds that ranks have after SIGTERM to write their checkpoint and exit before they get SIGKILL.

A rank in a collective operation, for which another one is missing, sees no SIGTERM. All processes of a cancelled run
are to have ended after 15 s, of which the worker takes some to see the cancellation, more on a busy machine. Prefect
kills its own process 30 s after SIGTERM, and the state must be reported by then."""

FAILED_GRACE_SECONDS = 5.0
"""The same after a rank has failed, when the others wait for it in a step that never ends."""

POLL_SECONDS = 0.5
"""Seconds between two checks of `stop`."""

STACK_SECONDS = 1.0
"""Seconds in which a rank that has stalled prints its stack."""

FAILED_SECONDS = 1.0
"""Seconds between the first failure of a rank and the end of all, in which its cause may show in another rank."""

TRACKING_SECONDS, LEAST_TRACKING_SECONDS = 10.0, 2.0
"""Seconds after the ranks were told to end until which the state of their MLflow run is set, and the least for it.

The tracking server may not answer. Ranks that had to be killed have taken 8 s, and this process takes a few to exit on
a busy machine. All processes of a cancelled run are to have ended after 15 s.
"""


OnEvent = Callable[[dict[str, Any]], None]
"""Called with each event of rank 0."""


def launch_ranks(spec: TrainingSpec, on_event: OnEvent | None = None, stop: threading.Event | None = None) -> RunRef:
    """Train with the ranks of `spec`, and return the MLflow run of rank 0.

    If a rank fails, all ranks are terminated; after a loss they are started again (`train_with_restarts`). If this
    process ends, by any signal, the ranks exit, on all hosts. Ranks on the GPUs of this machine wait for GPUs that no
    other training run has.

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
        OutOfMemory: A rank ran out of memory.
        RanksLost: A rank was ended by a signal, and no restart was left; the message has its last lines.
        RankFailed: A rank failed for another reason; the message has its last lines.
        RankStalled: A rank reported no progress for `train.stall_timeout_seconds`, and no restart was left.
        HostLost: A host does not answer, or no longer, and no restart was left; the error has its ranks.
        TimeLimitExceeded: Training exceeded `train.timeout_seconds`, here or in another process with the same run; or
            a lost rank keeps the lock of the run (`lock_training`).
        Stopped: `stop` was set.
    """
    given, spec = spec, choose_backend(spec)
    if spec.key != given.key:  # auto has decided on torch: the run may be one of Horovod, of an older release.
        from tasks.tracking.runs import find_finished_run  # Here: it loads MLflow.

        if found := find_finished_run(spec.storage, *given.keys):
            logger.info("MLflow run %s has already completed this training run", found.run_id)
            return found
    manifest = read_manifest(spec.cache.url)
    if manifest is not None:  # A missing cache is reported by the ranks.
        check_data(spec.train, manifest, spec.num_virtual_ranks)
    lock_path = launch_lock(spec.storage.checkpoints / spec.key)
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    # A second process with the same run waits here, before its ranks start, and then finds the run finished.
    lock = filelock.FileLock(lock_path)
    deadline = Deadline(spec.train.timeout_seconds)  # One for all waits, here and for GPUs, and for training.
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process is training the same run: waiting for its result")
        held = _wait_for_lock(lock, spec.train.timeout_seconds, stop)
    with held, gpus_of_run(spec, deadline.seconds_left, lambda: _check_stop(stop)) as gpus:
        attempt = functools.partial(_train, gpus=gpus, on_event=on_event, stop=stop, deadline=deadline)
        return train_with_restarts(spec, attempt, deadline, stop)


def _wait_for_lock(
    lock: filelock.BaseFileLock, timeout_seconds: int, stop: threading.Event | None
) -> filelock.AcquireReturnProxy:
    is_stopped = None if stop is None else stop.is_set
    try:
        return lock.acquire(timeout_seconds, POLL_SECONDS, cancel_check=is_stopped)
    except filelock.Timeout:
        _check_stop(stop)
        raise TimeLimitExceeded(
            "another process is training the same run, and has not ended within train.timeout_seconds "
            f"{timeout_seconds}",
            setting="train.timeout_seconds",
            way_out="wait for it or end it, then run again",
        ) from None


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped("training was stopped: run again to resume from the last checkpoint")


def _train(
    spec: TrainingSpec, gpus: Gpus, on_event: OnEvent | None, stop: threading.Event | None, deadline: Deadline
) -> RunRef:
    num_ranks = spec.num_ranks
    messages: queue.Queue[Message] = queue.Queue()
    ranks: list[RankProcess] = []
    run_id: str | None = None
    backend = spec.distributed.decided_backend if spec.distributed else "horovod"
    stall_setting, stall_seconds = spec.stall_limit
    watchdog = Watchdog(num_ranks, stall_seconds)

    def check() -> None:
        deadline.check()
        _check_stop(stop)

    with open_places(spec, gpus, RankOutput(messages, watchdog.on_activity), check) as places:
        try:
            for placement in place_ranks(places, num_ranks):
                threads = spec.train.num_threads or max(1, placement.place.cores // placement.place_size)
                variables = rank_variables(backend, placement, stall_seconds) | {"OMP_NUM_THREADS": str(threads)}
                ranks.append(placement.place.start(placement.rank, variables))
            while not all(rank.has_ended() for rank in ranks) or not messages.empty():
                check()
                received = None
                with suppress(queue.Empty):
                    received = messages.get(timeout=POLL_SECONDS)
                if received is not None:
                    _load_tracking()
                    rank, message = received
                    if isinstance(message, dict):
                        run_id = _handle_event(rank, message, on_event) or run_id
                    else:
                        _handle_line(rank, message)
                for rank in ranks:
                    if rank.has_ended():
                        watchdog.ended(rank.number)
                stall = watchdog.find_stall()  # In every turn, else it takes the gap for a stop of this process.
                if any(place.is_quiet for place in places):
                    continue  # If that host is lost, this is the cause of what other ranks report.
                _check_ends(ranks)
                if stall is not None:
                    for rank in ranks:
                        if rank.number in stall.ranks:
                            rank.show_stack()
                    _log_lines(messages, STACK_SECONDS)
                    raise RankStalled(
                        f"{stall.sentence}; {stall_setting} is {stall_seconds}, and all ranks were ended",
                        setting=stall_setting,
                        way_out="run again to resume from the last checkpoint, with a higher limit if a step may take "
                        "as long",
                    )
            _check_ends(ranks, wait=False)
        finally:
            stalled = isinstance(sys.exception(), RankStalled)
            # A worker that sees a cancellation late sends its signal although the run is ending already.
            check_left(run_uninterrupted(functools.partial(_end, ranks, spec, stalled=stalled)))
    if run_id is None:
        raise RankFailed("the ranks ended without an error and without a result: their output is in the log")
    return RunRef(run_id=run_id)


def _end(ranks: list[RankProcess], spec: TrainingSpec, *, stalled: bool) -> dict[int, int]:
    """End the ranks, and their MLflow run if they had to be killed; return those that are left, as `terminate`."""
    told_at = time.monotonic()
    if any(rank.process.poll() is None for rank in ranks):
        _load_tracking()
    # If no rank has failed, they write a checkpoint together and exit.
    failed = any(rank.process.poll() not in (None, 0, EXIT_ENDED) for rank in ranks)
    left = terminate(ranks, FAILED_GRACE_SECONDS if failed or stalled else SHUTDOWN_GRACE_SECONDS)
    if any(rank.process.poll() is None or rank.process.returncode < 0 for rank in ranks):
        _end_killed_run(spec, told_at)
    return left


def check_left(left: Mapping[int, int]) -> None:
    """Check that ranks may start again after the loss that is being handled, if it is one.

    Args:
        left: Process ids of ranks that outlive SIGKILL, by rank: they hold the training run's lock and their GPUs.

    Raises:
        RankFailed: There are some. It is not retried.
    """
    loss = sys.exception()
    if not left or not isinstance(loss, LOSSES):
        return
    named = ", ".join(f"{rank} (process {process})" for rank, process in left.items())
    failure = RankFailed(
        f"rank {named} was killed and does not end, so no rank is started again (a driver or a disk does not answer: "
        f"see `dmesg`); run again once it has ended. Before it: {loggable(loss)}"
    )
    failure.was_retried = True
    raise failure from loss


def _check_ends(ranks: list[RankProcess], *, wait: bool = True) -> None:
    """Check that no rank has failed; with `wait`, a first failure waits for those of other ranks.

    Raises:
        UserError: The error that a rank reported.
        HostLost: The host of a rank is lost.
        RanksLost: A rank was ended by a signal from outside.
        RankFailed: A rank failed for another reason.
    """
    failed = first_failed(ranks)
    if failed is None:
        return
    first = min(rank.ended_at for rank in ranks if rank.ended_at is not None and rank.process.returncode != 0)
    if wait and (time.monotonic() - first < FAILED_SECONDS or not failed.has_ended()):
        return
    if failed.failure is not None:
        raise failed.failure
    status = failed.process.returncode
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    # Ranks that are told to end write a checkpoint together first; this process has told none so far.
    is_lost = status < 0 or status == EXIT_ENDED
    kind = RanksLost if is_lost else RankFailed
    raise kind(f"rank {failed.number} {how}; its last lines:\n" + "\n".join(failed.lines))


def _end_killed_run(spec: TrainingSpec, told_at: float) -> None:
    """Set the state of the MLflow run that killed ranks left as running; the caller holds the launch lock.

    An outage of the tracking server neither delays the end nor hides its cause: the next start of the training run
    sets the state.

    Args:
        spec: The training run.
        told_at: When the ranks were told to end, on the monotonic clock.
    """

    def end() -> None:
        from tasks.tracking.runs import end_abandoned_runs

        try:
            with lock_if_free(training_lock(spec.storage.checkpoints / spec.key)) as is_held:
                if is_held:
                    end_abandoned_runs(spec.storage, spec.key, keep=None)
                    return
            logger.info(
                "the MLflow run stays as it is: another process, or a rank that does not end, holds the training run"
            )
        except Exception as error:
            logger.warning("the MLflow run is left as running: %s", loggable(error))

    thread = threading.Thread(target=end, name="end-killed-run", daemon=True)
    thread.start()
    thread.join(max(LEAST_TRACKING_SECONDS, told_at + TRACKING_SECONDS - time.monotonic()))
    if thread.is_alive():
        logger.warning("the MLflow run is left as running: '%s' does not answer", spec.storage.tracking_shown)


@functools.cache
def _load_tracking() -> None:
    """Load MLflow in a thread: not before the ranks start, and before they are killed, when there is little time."""
    threading.Thread(target=import_module, args=("tasks.tracking.runs",), name="load-tracking", daemon=True).start()


def _handle_event(rank: RankProcess, event: dict[str, Any], on_event: OnEvent | None) -> str | None:
    """Handle an event of a rank; return the id of the MLflow run, if it is in the event."""
    if "failed" in event:
        rank.failure = restored_error(event["failed"])
    if "step" in event:
        publish(StepProgress(**event))
    if on_event is not None and "epoch" in event:
        on_event(event)
    return event.get("run_id")


def _handle_line(rank: RankProcess, line: str | None) -> None:
    if line is None:
        rank.open_pipes -= 1
        return
    rank.lines.append(line)
    logger.info("rank %d: %s", rank.number, line)


def _log_lines(messages: "queue.Queue[Message]", seconds: float) -> None:
    """Log the lines that the ranks write within the given time."""
    until = time.monotonic() + seconds
    with suppress(queue.Empty):
        while (left := until - time.monotonic()) > 0:
            rank, message = messages.get(timeout=left)
            if not isinstance(message, dict):
                _handle_line(rank, message)
