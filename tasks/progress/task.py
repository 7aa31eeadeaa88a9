"""Progress artifacts of a Prefect run, written by a thread of their own: a server that is away slows nothing."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.progress.count import EPOCHS, Standing, heard_by

logger = logging.getLogger("lakevision.progress")

LAST_SECONDS = 2.0
"""How long the end of a stage waits for its last update."""

AWAY_SECONDS = 30.0
"""After a failed update, until the next one."""


class _Artifacts:
    """The progress artifacts of one stage, one a step, made when a step is first heard of."""

    def __init__(self) -> None:
        self._latest: dict[str, Standing] = {}
        self._made: dict[str, UUID] = {}
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._told = False
        # Prefect finds the run that an artifact belongs to in the context, which a thread does not inherit.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._write_all,), name="progress", daemon=True
        )

    def hear(self, standing: Standing) -> None:
        """Keep the newest standing of a step for the thread."""
        self._latest[standing.step] = standing
        self._changed.set()

    def _write_all(self) -> None:
        while True:
            self._changed.wait()
            ended = self._ended.is_set()
            self._changed.clear()
            for step in list(self._latest):
                try:
                    self._write(self._latest.pop(step))
                except Exception as error:  # Whatever it is: no work ends because nobody can be shown how far it is.
                    self._wait_for_server(step, error)
            if ended:
                return

    def _wait_for_server(self, step: str, error: Exception) -> None:
        if not self._told:
            logger.warning("the progress of '%s' could not be shown: %s", step, error)
        self._told = True
        self._ended.wait(AWAY_SECONDS)

    def _write(self, standing: Standing) -> None:
        artifact = self._made.get(standing.step)
        if artifact is None:
            key = standing.step if standing.step.endswith(EPOCHS) else f"{standing.step}-progress"
            created = create_progress_artifact(progress=standing.percent, key=key, description=str(standing))
            self._made[standing.step] = UUID(str(created))
        else:
            update_progress_artifact(artifact_id=artifact, progress=standing.percent, description=str(standing))

    def end(self) -> None:
        """Write what is left, and wait a little for it."""
        self._ended.set()
        self._changed.set()
        self._thread.join(LAST_SECONDS)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()


@contextmanager
def progress_artifacts() -> Iterator[None]:
    """Show meanwhile as artifacts of the current Prefect run how far the steps in it are."""
    artifacts = _Artifacts()
    artifacts.start()
    with heard_by(artifacts.hear):
        try:
            yield
        finally:
            artifacts.end()
