"""Counters of the images and epochs that steps have processed, and their listeners; uses only the standard library."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("lakevision.progress")

UPDATE_SECONDS = 2.0
"""Minimum interval between two updates of one step, and between two log lines of one Spark task."""

EPOCHS = "-epochs"
"""Suffix of the name of a step that counts epochs."""


@dataclass(frozen=True)
class StepProgress:
    """Progress of a step at one moment."""

    step: str
    done: int
    total: int
    seconds: float
    unit: str = "images"
    note: str = ""
    """Further text to show, as the last metric."""

    @property
    def percent(self) -> float:
        """Percentage of the step that is done, 0 to 100."""
        return 100.0 * self.done / self.total if self.total else 100.0

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the mean rate so far; None before the first image."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None

    def __str__(self) -> str:
        """Return done and total, note, rate, and time left."""
        parts = [f"{self.done:,} of {self.total:,} {self.unit}", *([self.note] if self.note else [])]
        if self.seconds_left is not None:
            if self.unit == "images":  # an epoch takes minutes: its rate per second would round to 0
                rate = self.done / self.seconds if self.seconds else 0.0
                parts.append(f"{rate:,.0f} images/s")
            if self.done < self.total:
                parts.append(f"{format_seconds(self.seconds_left)} left")
        return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a duration as text, such as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


Listener = Callable[[StepProgress], None]


@dataclass
class _Step:
    total: int
    began: float = field(default_factory=time.monotonic)
    last_update: float = 0.0
    done: dict[str, int] = field(default_factory=dict)


class _Counts:
    """The steps that run in this process; the threads that read the output of workers and ranks update them."""

    lock = threading.Lock()
    steps: dict[str, _Step] = {}  # noqa: RUF012  # shared by the whole process, on purpose
    listeners: list[Listener] = []  # noqa: RUF012  # likewise


@contextmanager
def listener(listener: Listener) -> Iterator[None]:
    """Call a listener with the progress of steps within the context, from several threads; it must not block."""
    _Counts.listeners.append(listener)
    try:
        yield
    finally:
        _Counts.listeners.remove(listener)


@contextmanager
def counted(step: str, total: int) -> Iterator[None]:
    """Count the images of a step within the context; on success all of them are reported as done at the end."""
    with _Counts.lock:
        _Counts.steps[step] = _Step(total)
    _publish_count(step, force=True)
    try:
        yield
        with _Counts.lock:
            _Counts.steps[step].done = {"all": total}
        _publish_count(step, force=True)
    finally:
        with _Counts.lock:
            _Counts.steps.pop(step, None)


def advance(step: str, part: str, done: int) -> None:
    """Update the number of images that a part of a step (a Spark partition, a rank) has processed.

    Steps without a counter are ignored. A part that is processed again, after its executor was lost, is counted once.
    """
    with _Counts.lock:
        counted_step = _Counts.steps.get(step)
        if counted_step is None:
            return
        counted_step.done[part] = max(done, counted_step.done.get(part, 0))
    _publish_count(step, force=False)


def _publish_count(step: str, *, force: bool) -> None:
    with _Counts.lock:
        running = _Counts.steps.get(step)
        now = time.monotonic()
        if running is None or (not force and now - running.last_update < UPDATE_SECONDS):
            return
        running.last_update = now
        done = min(running.total, sum(running.done.values()))
        progress = StepProgress(step, done, running.total, now - running.began)
    publish(progress)


def publish(progress: StepProgress) -> None:
    """Pass the progress of a step that was counted here, or in another process, to all listeners."""
    with _Counts.lock:
        listeners = list(_Counts.listeners)
    for listener in listeners:
        try:
            listener(progress)
        except Exception as error:  # A failure of the display must not end the work.
            logger.warning("the progress of '%s' could not be shown: %s", progress.step, error)


class EpochProgress:
    """Counter of trained epochs that passes the events of rank 0 to the progress listeners."""

    def __init__(self, key: str, max_epochs: int) -> None:
        """Report the start of the training run, with no epoch trained.

        Args:
            key: Name of the training run within its flow; the step is called `<key>-epochs`.
            max_epochs: Maximum number of epochs; training may stop early.
        """
        self._step = f"{key}{EPOCHS}"
        self._began = time.monotonic()
        self._before: int | None = None
        self._last = StepProgress(self._step, 0, max_epochs, 0.0, "epochs")
        publish(self._last)

    def update(self, event: Mapping[str, Any]) -> None:
        """Report the progress in an event with epoch (the number of epochs trained), max_epochs and val_accuracy."""
        epoch = event["epoch"]
        if self._before is None or epoch <= self._before:
            self._before = epoch - 1  # a resumed run has trained these in an earlier process
        # Extrapolated, as if all epochs had been trained at the rate of this process.
        seconds = (time.monotonic() - self._began) * epoch / (epoch - self._before)
        note = f"val accuracy {event['val_accuracy']:.4f}"
        self._last = StepProgress(self._step, epoch, event["max_epochs"], seconds, "epochs", note)
        publish(self._last)

    def end(self) -> None:
        """Report that the training run has ended, with the number of epochs trained as the total."""
        last = self._last
        seconds = time.monotonic() - self._began
        publish(StepProgress(self._step, last.done, last.done, seconds, "epochs", last.note))
