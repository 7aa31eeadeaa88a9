"""Progress artifacts of a Prefect run, written by a thread so that a slow or lost server delays nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.progress.count import EPOCHS, StepProgress, listener
from tasks.progress.latest import LatestWriter


class _Artifacts:
    """The progress artifacts of one stage: one per step, created with the step's first update."""

    def __init__(self) -> None:
        self._created: dict[str, UUID] = {}

    def write(self, step: str, progress: StepProgress) -> None:
        """Create or update the artifact of a step."""
        artifact = self._created.get(step)
        if artifact is None:
            key = step if step.endswith(EPOCHS) else f"{step}-progress"
            created = create_progress_artifact(progress=progress.percent, key=key, description=str(progress))
            self._created[step] = UUID(str(created))
        else:
            update_progress_artifact(artifact_id=artifact, progress=progress.percent, description=str(progress))


@contextmanager
def progress_artifacts() -> Iterator[None]:
    """Publish the progress of the steps within the context as artifacts of the current Prefect run."""
    writer = LatestWriter(_Artifacts().write)
    with listener(lambda progress: writer.put(progress.step, progress)):
        try:
            yield
        finally:
            writer.end()
