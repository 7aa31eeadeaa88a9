"""The runs among which a promotion chooses."""

from mlflow import MlflowClient
from mlflow.entities import Run, RunStatus
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.searches import BEST_TRIAL_TAG, TRIAL_TAG
from tasks.tracking.server import client_of, prepare_tracking


def promotable_runs(storage: Storage) -> list[RunRef]:
    """Return the newest finished run and every other finished run on the same cache, the newest first.

    Of the trials of a hyper-parameter search only the best one counts, once the search has finished: the maximum over
    many trials is higher than their accuracy on new images.
    """
    experiment, client = prepare_tracking(storage), client_of(storage)
    found = client.search_runs(
        [experiment],
        "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
        order_by=["attributes.start_time DESC"],
    )
    best: dict[str, str | None] = {}
    runs = [run for run in found if TRIAL_TAG not in run.data.tags or _is_best(client, run, best)]
    if not runs:
        return []
    digest = runs[0].data.params["cache.digest"]
    return [RunRef(run_id=run.info.run_id) for run in runs if run.data.params["cache.digest"] == digest]


def _is_best(client: MlflowClient, trial: Run, best: dict[str, str | None]) -> bool:
    """Return whether a trial is the best of a finished search; `best` holds the best trial by search."""
    search = trial.data.tags.get(MLFLOW_PARENT_RUN_ID, "")
    if search not in best:
        best[search] = _best_trial(client, search)
    return best[search] == str(trial.data.tags[TRIAL_TAG])


def _best_trial(client: MlflowClient, search: str) -> str | None:
    """Return the number of the best trial of a search, or None if it has not finished or was deleted."""
    try:
        run = client.get_run(search)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    is_finished = run.info.status == RunStatus.to_string(RunStatus.FINISHED)
    return run.data.tags.get(BEST_TRIAL_TAG) if is_finished else None
