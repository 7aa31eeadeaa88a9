"""Count the images that a step has done, and tell it to whoever shows it; imports nothing but the standard library."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger("lakevision.progress")

TELL_SECONDS = 2.0
"""Between two tellings of the same step, and between two lines of the same Spark task."""

EPOCHS = "-epochs"
"""How the name of a step ends that counts epochs."""


@dataclass(frozen=True)
class Standing:
    """How far a step is."""

    step: str
    done: int
    total: int
    seconds: float
    unit: str = "images"
    note: str = ""
    """What is to be said of it besides."""

    @property
    def percent(self) -> float:
        """Share of the step that is done, 0 to 100."""
        return 100.0 * self.done / self.total if self.total else 100.0

    @property
    def seconds_left(self) -> float | None:
        """Time that the rest takes at the rate so far; None before the first image."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None

    def __str__(self) -> str:
        """Return done and total, note, rate, and time left."""
        parts = [f"{self.done:,} of {self.total:,} {self.unit}", *([self.note] if self.note else [])]
        if self.seconds_left is not None:
            if self.unit == "images":  # an epoch takes minutes: none per second
                rate = self.done / self.seconds if self.seconds else 0.0
                parts.append(f"{rate:,.0f} images/s")
            if self.done < self.total:
                parts.append(f"{format_seconds(self.seconds_left)} left")
        return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a duration as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


Listener = Callable[[Standing], None]


@dataclass
class _Step:
    total: int
    began: float = field(default_factory=time.monotonic)
    told: float = 0.0
    done: dict[str, int] = field(default_factory=dict)


class _Counts:
    """The steps that run in this process; they are counted by the threads that read what workers and ranks say."""

    lock = threading.Lock()
    steps: dict[str, _Step] = {}  # noqa: RUF012  # one for the process, on purpose
    listeners: list[Listener] = []  # noqa: RUF012  # the same


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Tell a listener meanwhile how far steps are; it is called from several threads and must return at once."""
    _Counts.listeners.append(listener)
    try:
        yield
    finally:
        _Counts.listeners.remove(listener)


@contextmanager
def counted(step: str, total: int) -> Iterator[None]:
    """Count the images of a step meanwhile; at its end all of them are done, unless it failed."""
    begin(step, total)
    try:
        yield
        with _Counts.lock:
            _Counts.steps[step].done = {"all": total}
        _tell(step, force=True)
    finally:
        with _Counts.lock:
            _Counts.steps.pop(step, None)


def begin(step: str, total: int) -> None:
    """Begin to count a step of so many images."""
    with _Counts.lock:
        _Counts.steps[step] = _Step(total)
    _tell(step, force=True)


def advance(step: str, part: str, done: int) -> None:
    """Take in how many images a part of a step (a Spark partition, a rank) has done; one that is not counted is not.

    A part that is done again, after its executor was lost, is counted once.
    """
    with _Counts.lock:
        counted_step = _Counts.steps.get(step)
        if counted_step is None:
            return
        counted_step.done[part] = max(done, counted_step.done.get(part, 0))
    _tell(step, force=False)


def _tell(step: str, *, force: bool) -> None:
    with _Counts.lock:
        running = _Counts.steps.get(step)
        now = time.monotonic()
        if running is None or (not force and now - running.told < TELL_SECONDS):
            return
        running.told = now
        done = min(running.total, sum(running.done.values()))
        standing = Standing(step, done, running.total, now - running.began)
    tell(standing)


def tell(standing: Standing) -> None:
    """Tell all listeners how far a step is that was counted here, or in another process."""
    with _Counts.lock:
        listeners = list(_Counts.listeners)
    for listener in listeners:
        try:
            listener(standing)
        except Exception as error:  # No work ends because nobody can be shown how far it is.
            logger.warning("the progress of '%s' could not be shown: %s", standing.step, error)
