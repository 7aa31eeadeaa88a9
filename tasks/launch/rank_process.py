"""The process of a rank: its start, its output and events, and its end."""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tasks.launch.protocol import ACTIVITY, EXIT_ENDED, Channel
from tasks.progress.activity import Activity

logger = logging.getLogger("lakevision.ranks")

LAST_LINES = 30
"""Lines of a failed rank's output in its error."""

KILL_SECONDS = 10.0
"""Time limit for the end of ranks of this machine after SIGKILL."""

REMOTE_KILL_SECONDS = 5.0
"""The same for ranks of other hosts; those whose host does not answer are ended by the agent there."""

DRAIN_SECONDS = 2.0
"""Time for the last output of a process that has ended: a child of its own may keep the pipe open."""

OUT_OF_MEMORY = (
    "the kernel of this machine has killed a process for lack of memory meanwhile, probably this one: lower "
    "train.batch_size, or give the machine or container more memory"
)
"""The last line of a rank that the kernel has probably killed.

It is retried as any lost rank is, from its checkpoint: another process may have taken the memory, and be gone by then.
"""

KERNEL_COUNTERS = Path("/proc/vmstat")
"""Counters of this machine's kernel, one per line; Linux alone has it."""


class RemoteProcess:
    """A process that an agent started; its methods are those of `subprocess.Popen`."""

    stdin = None

    def __init__(self, number: int, channel: Channel) -> None:
        self.returncode: int | Any = None  # as typeshed has it for Popen
        self._number = number
        self._channel = channel
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once the process has ended, or its host is lost."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"rank {self._number}", timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.returncode is None:
            self._channel.send("signal", rank=self._number, number=int(sig))

    def end(self, status: int) -> None:
        """Note that the process has ended."""
        if self.returncode is None:
            self.returncode = status
            self._has_ended.set()


@dataclass
class RankProcess:
    """A rank, started by this process or by an agent."""

    number: int
    process: "subprocess.Popen[str] | RemoteProcess"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    open_pipes: int = 2
    """Pipes that may hold more: output and events. Below 0 if their end was noted twice, also for a lost host."""
    failure: Exception | None = None
    """The user error that the rank reported, or the loss of its host."""
    ended_at: float | None = None

    def has_ended(self) -> bool:
        """Return whether the process has ended, and all that it wrote is read."""
        if self.ended_at is None:
            # A process that has closed both pipes is about to end.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.0 if self.open_pipes else 0.1)
                self.ended_at = time.monotonic()
        return self.ended_at is not None and (self.open_pipes <= 0 or time.monotonic() - self.ended_at > DRAIN_SECONDS)

    def show_stack(self) -> None:
        """Let the process print the Python stacks of its threads, if it runs."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)


Message = tuple[RankProcess, str | dict[str, Any] | None]
"""A rank with a line of its output, an event, or None at the end of one of the two."""


class RankOutput(NamedTuple):
    """Receiver of what ranks send."""

    messages: "queue.Queue[Message]"
    on_activity: Callable[[int, Activity], None]
    """Called with the number of a rank and its activity."""


def memory_kills() -> int:
    """Return how many processes the kernel of this machine has killed for lack of memory; 0 where it does not tell.

    The counter `oom_kill` of Linux includes those of containers and other memory cgroups.
    """
    with suppress(OSError):
        for line in KERNEL_COUNTERS.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def start(
    number: int, spec_path: Path, environment: dict[str, str], output: RankOutput, locks: Sequence[int] = ()
) -> RankProcess:
    """Start a rank, and threads that read its output, events and activity into `output`.

    If the rank is killed, and the kernel has killed a process for lack of memory meanwhile, the last line says so. The
    rank inherits the file descriptors `locks`.
    """
    kills_before = memory_kills()
    events, to_events = os.pipe()
    try:
        process = subprocess.Popen(
            # -P: a folder or module in the working directory, such as the home on another host, replaces none of ours.
            [sys.executable, "-P", "-u", "-m", "tasks.launch.start_rank", str(to_events), str(spec_path)],
            # Never written to: the pipe closes when this process ends, and then the rank exits.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(to_events, *locks),
            text=True,
            errors="replace",
            env=environment,
            # Its own session, so that Ctrl-C on the terminal reaches the ranks only through this process.
            start_new_session=True,
        )
    except BaseException:
        os.close(events)
        raise
    finally:
        os.close(to_events)
    rank = RankProcess(number, process)

    def read_output() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                output.messages.put((rank, line.rstrip("\n")))
        with suppress(subprocess.TimeoutExpired):
            if process.wait(timeout=DRAIN_SECONDS) == -signal.SIGKILL and memory_kills() > kills_before:
                output.messages.put((rank, OUT_OF_MEMORY))
        output.messages.put((rank, None))

    def read_events() -> None:
        with os.fdopen(events) as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break  # The rank was killed while it wrote this line.
                event = json.loads(line)
                if ACTIVITY in event:
                    output.on_activity(number, Activity(*event[ACTIVITY]))
                else:
                    output.messages.put((rank, event))
        output.messages.put((rank, None))

    for read in (read_output, read_events):
        threading.Thread(target=read, name=f"rank-{number}-{read.__name__}", daemon=True).start()
    return rank


def first_failed(ranks: Sequence[RankProcess]) -> RankProcess | None:
    """Return the rank that caused the failure of all, or None if none has failed.

    A rank that was killed or refused its input comes before those that fail because it is missing.
    """

    def order(rank: RankProcess) -> tuple[int, float]:
        status = rank.process.returncode
        kind = 0 if rank.failure is not None else 1 if status < 0 else 3 if status == EXIT_ENDED else 2
        return kind, rank.ended_at or 0.0

    failed = [rank for rank in ranks if rank.ended_at is not None and rank.process.returncode != 0]
    return min(failed, key=order, default=None)


def terminate(ranks: Sequence[RankProcess], grace_seconds: float) -> dict[int, int]:
    """Terminate all running ranks, on a cancel, failure or timeout, and wait until they have ended.

    Returns:
        Process ids of ranks of this machine that outlive SIGKILL by more than KILL_SECONDS, by rank: a process that
        waits for a driver or a disk does, until that answers.
    """
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for rank in running:
        try:
            rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.send_signal(signal.SIGKILL)
    killed_at, left = time.monotonic(), dict[int, int]()
    for rank in running:
        here = rank.process.pid if isinstance(rank.process, subprocess.Popen) else None
        deadline = killed_at + (REMOTE_KILL_SECONDS if here is None else KILL_SECONDS)
        try:
            rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            if here is None:
                logger.warning(
                    "rank %d has been killed and may still run: its host, or a driver or disk there, does not answer; "
                    "the agent there ends it",
                    rank.number,
                )
            else:
                left[rank.number] = here
                logger.warning(
                    "rank %d (process %d) has been killed and does not end: a driver or a disk does not answer, see "
                    "`dmesg`",
                    rank.number,
                    here,
                )
    for rank in ranks:
        if rank.process.stdin is not None:
            rank.process.stdin.close()
    return left
