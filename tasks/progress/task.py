"""Progress artifacts of a Prefect run, written by a thread so that a slow or lost server delays nothing."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.progress.count import EPOCHS, StepProgress, listener

logger = logging.getLogger("lakevision.progress")

LAST_SECONDS = 2.0
"""How long the end of a stage waits for its last update to be written."""

UNAVAILABLE_SECONDS = 30.0
"""Delay between a failed update and the next one."""


class _Artifacts:
    """The progress artifacts of one stage: one per step, created with the step's first update."""

    def __init__(self) -> None:
        self._latest: dict[str, StepProgress] = {}
        self._created: dict[str, UUID] = {}
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._has_warned = False
        # Prefect takes the run that an artifact belongs to from the context, which a thread does not inherit.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._write_all,), name="progress", daemon=True
        )

    def update(self, progress: StepProgress) -> None:
        """Store the latest progress of a step for the thread."""
        self._latest[progress.step] = progress
        self._changed.set()

    def _write_all(self) -> None:
        while True:
            self._changed.wait()
            ended = self._ended.is_set()
            self._changed.clear()
            for step in list(self._latest):
                try:
                    self._write(self._latest.pop(step))
                except Exception as error:  # A failure of the display, of any kind, must not end the work.
                    self._wait_for_server(step, error)
            if ended:
                return

    def _wait_for_server(self, step: str, error: Exception) -> None:
        if not self._has_warned:
            logger.warning("the progress of '%s' could not be shown: %s", step, error)
        self._has_warned = True
        self._ended.wait(UNAVAILABLE_SECONDS)

    def _write(self, progress: StepProgress) -> None:
        artifact = self._created.get(progress.step)
        if artifact is None:
            key = progress.step if progress.step.endswith(EPOCHS) else f"{progress.step}-progress"
            created = create_progress_artifact(progress=progress.percent, key=key, description=str(progress))
            self._created[progress.step] = UUID(str(created))
        else:
            update_progress_artifact(artifact_id=artifact, progress=progress.percent, description=str(progress))

    def end(self) -> None:
        """Write the remaining updates, and wait at most LAST_SECONDS for that."""
        self._ended.set()
        self._changed.set()
        self._thread.join(LAST_SECONDS)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()


@contextmanager
def progress_artifacts() -> Iterator[None]:
    """Publish the progress of the steps within the context as artifacts of the current Prefect run."""
    artifacts = _Artifacts()
    artifacts.start()
    with listener(artifacts.update):
        try:
            yield
        finally:
            artifacts.end()
