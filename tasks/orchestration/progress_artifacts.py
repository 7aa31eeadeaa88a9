"""Progress artifacts of a Prefect run, written by a thread so that a slow or lost server delays nothing."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.progress.count import EPOCHS, StepProgress, listener

logger = logging.getLogger("lakevision.progress")

Value = TypeVar("Value")

LAST_SECONDS = 2.0
"""How long the end of a stage waits for its last update to be written."""

UNAVAILABLE_SECONDS = 30.0
"""Delay between a failed update and the next one."""


@contextmanager
def progress_artifacts() -> Iterator[None]:
    """Publish the progress of the steps within the context as artifacts of the current Prefect run, one per step."""
    artifacts: dict[str, UUID] = {}

    def write(step: str, progress: StepProgress) -> None:
        if step in artifacts:
            update_progress_artifact(artifacts[step], progress=progress.percent, description=str(progress))
        else:
            key = step if step.endswith(EPOCHS) else f"{step}-progress"
            created = create_progress_artifact(progress=progress.percent, key=key, description=str(progress))
            artifacts[step] = UUID(str(created))

    writer = LatestWriter(write)
    with listener(lambda progress: writer.put(progress.step, progress)):
        try:
            yield
        finally:
            writer.end()


class LatestWriter(Generic[Value]):
    """A thread that writes values by name: of values that come faster than it writes, the last of each name."""

    def __init__(self, write: Callable[[str, Value], None], least_seconds: float = 0.0) -> None:
        """Start the thread.

        Args:
            write: Writes the value of a name; an error of any kind is logged once, and must not end the work.
            least_seconds: Minimum interval between two writes.
        """
        self._write, self._least_seconds = write, least_seconds
        self._latest: dict[str, Value] = {}
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._has_warned = False
        # Prefect takes the run that an artifact belongs to from the context, which a thread does not inherit.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._write_all,), name="progress", daemon=True
        )
        self._thread.start()

    def put(self, name: str, value: Value) -> None:
        """Store the latest value of a name for the thread."""
        self._latest[name] = value
        self._changed.set()

    def _write_all(self) -> None:
        while True:
            self._changed.wait()
            ended = self._ended.is_set()
            self._changed.clear()
            for name in list(self._latest):
                try:
                    self._write(name, self._latest.pop(name))
                except Exception as error:  # A failure of the display, of any kind, must not end the work.
                    self._wait_for_server(name, error)
            if ended:
                return
            self._ended.wait(self._least_seconds)

    def _wait_for_server(self, name: str, error: Exception) -> None:
        if not self._has_warned:
            logger.warning("the progress of '%s' could not be shown: %s", name, error)
        self._has_warned = True
        self._ended.wait(UNAVAILABLE_SECONDS)

    def end(self) -> None:
        """Write the remaining values, and wait at most LAST_SECONDS for that."""
        self._ended.set()
        self._changed.set()
        self._thread.join(LAST_SECONDS)
