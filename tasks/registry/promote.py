"""Register the better run and let the alias `champion` name it."""

import logging
from collections.abc import Sequence

from tasks import tracking
from tasks.config import PromoteConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef, RunRef
from tasks.registry.gate import choose_best
from tasks.storage import Storage

logger = logging.getLogger("lakevision.registry")

CHAMPION = "champion"


def promote_best(runs: Sequence[RunRef], promote: PromoteConfig, storage: Storage) -> tuple[ModelRef, bool]:
    """Register the best of the runs and make it the champion; without runs, of the newest and all on its cache.

    Returns:
        The champion, and whether the alias moved now.

    Raises:
        WrongInput: A run has no test accuracy, or none passes the gate.
    """
    runs = runs or tracking.promotable_runs(storage)
    if not runs:
        raise WrongInput(f"'{storage.tracking_shown}' has no finished run to promote: run the flow train first")
    accuracies = {}
    for run in runs:
        metrics = tracking.run_metrics(storage, run)
        if "test_accuracy" not in metrics:
            raise WrongInput(
                f"MLflow run '{run.run_id}' has no metric test_accuracy: give finished runs of the flow train"
            )
        accuracies[run.run_id] = metrics["test_accuracy"]
    best = RunRef(run_id=choose_best(accuracies, promote.min_test_accuracy))
    previous = tracking.model_with_alias(storage, promote.model_name, CHAMPION)
    model = tracking.register_run(storage, best, promote.model_name)
    if previous == model:
        logger.info("%s version %d is the champion already", model.name, model.version)
        return model, False
    tags = {"test_accuracy": f"{accuracies[best.run_id]:.6f}", "candidates": tracking.to_json(accuracies)}
    if previous is not None:
        # An alias keeps no history: this is what a rollback goes back to.
        tags["previous_champion"] = str(previous.version)
    tracking.set_alias(storage, model, CHAMPION, tags)
    logger.info("%s version %d is the champion: test accuracy %.4f", model.name, model.version, accuracies[best.run_id])
    return model, True
