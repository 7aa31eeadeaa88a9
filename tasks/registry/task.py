"""The promotion stage as a Prefect task."""

from tasks.config import PromoteConfig
from tasks.orchestration.task import skipped, stage
from tasks.refs import ModelRef, RunRef
from tasks.registry.promote import promote_best
from tasks.storage import Storage


@stage("promote", timeout_seconds=1800)
def promote_run(runs: list[RunRef], promote: PromoteConfig, storage: Storage) -> ModelRef:
    """Register the better run and let the alias champion name it."""
    model, moved = promote_best(runs, promote, storage)
    return model if moved else skipped(model, f"version {model.version} is the champion already")
