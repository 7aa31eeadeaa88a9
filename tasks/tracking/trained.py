"""Finished training runs in MLflow: what they logged, and those among which a promotion chooses."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Run, RunStatus
from mlflow.exceptions import MlflowException

from tasks.credentials import without_credentials
from tasks.errors import WrongInput
from tasks.model_package.description import WEIGHTS_FILE
from tasks.refs import TRIAL_TAG, RunRef, TableRef
from tasks.storage import Storage
from tasks.tracking import runs
from tasks.tracking.classifier_files import OLD_MODEL_TAG
from tasks.tracking.experiments import TRAINING, renamed_experiments
from tasks.tracking.files import read_json, repository
from tasks.tracking.models import whole_model
from tasks.tracking.server import EXPERIMENT, all_results, client_of, prepare_tracking
from tasks.tracking.trained_tables import TABLE_PARAM

CACHE_PARAM = "cache.digest"
"""Parameter that every training run of this project has, and a run of another program has not."""

REPEAT_TAG = "lakevision.repeat_of"
"""Tag of a repeated training run with the id of the original run."""

CHOSEN_TAG = "lakevision.chosen"
"""Tag of a trial whose settings were trained outside its search as well, as a search ends with those of its best."""


@dataclass(frozen=True)
class LoggedTraining:
    """Settings, provenance and metrics of a finished training run in MLflow."""

    run_id: str
    config: dict[str, Any]
    """Content of `config.json`."""
    versions: dict[str, str]
    """Versions of packages, by name."""
    code_version: str | None
    metrics: dict[str, float]
    batch_sizes: dict[str, str]
    """Automatically chosen batch sizes, by the number of the phase."""
    resumed_with_changes: str | None = None
    """Differences in provenance with which the run was resumed, if any."""
    plan: str | None = None
    """Plan of the recipe's fine-tuning as JSON, if it has one."""


def logged_training(storage: Storage, run_id: str) -> LoggedTraining:
    """Return what a finished training run logged.

    Raises:
        WrongInput: The run does not exist, has not finished, or is not a training run.
    """

    def refused(why: str) -> WrongInput:
        way_out = "give a finished run of the flow train, train-distributed or tune"
        return WrongInput(f"run_id is '{run_id}', {why}", setting="run_id", way_out=way_out)

    try:
        run = client_of(storage).get_run(run_id)
    except MlflowException as error:
        message = without_credentials(str(error))
        raise refused(f"which '{storage.tracking_shown}' does not have ({message})") from None
    if run.info.status != RunStatus.to_string(RunStatus.FINISHED):
        raise refused(f"whose status is {run.info.status}")
    if OLD_MODEL_TAG in run.data.tags:
        raise refused("whose model is of release 0.1.0 and cannot be compared")
    if "test_accuracy" not in run.data.metrics or CACHE_PARAM not in run.data.params:
        raise refused("which is not a training run")
    config = read_json(storage, run_id, runs.CONFIG_FILE)
    if TABLE_PARAM in run.data.params and "table" in config.get("data", {}):
        config["data"]["table"] = run.data.params[TABLE_PARAM]  # Of a moved home, the parameter has the new path.
    return LoggedTraining(
        run_id=run_id,
        config=config,
        versions=runs.values_below(run.data.params, runs.VERSION_PARAM),
        code_version=run.data.tags.get(runs.CODE_TAG),
        metrics=dict(run.data.metrics),
        batch_sizes=runs.values_below(run.data.tags, runs.BATCH_SIZE_TAG),
        resumed_with_changes=run.data.tags.get(runs.RESUMED_WITH_CHANGES_TAG),
        plan=run.data.tags.get(runs.PLAN_TAG),
    )


def newest_training(storage: Storage) -> RunRef:
    """Return the newest finished training run that is not a repetition.

    Raises:
        WrongInput: No training run has finished.
    """
    for run in _finished_runs(storage):
        if REPEAT_TAG not in run.data.tags:
            return RunRef(run_id=run.info.run_id)
    raise no_finished_run(storage, "run_id is empty, and ", setting="run_id")


def no_finished_run(storage: Storage, why: str = "", setting: str = "") -> WrongInput:
    """Return the error that no training run has finished, or that those that have are not found any more.

    Args:
        storage: Storage with the tracking URI.
        why: First words of the message.
        setting: The setting that the error is about.
    """
    renamed = renamed_experiments(client_of(storage), TRAINING)
    return WrongInput(
        f"{why}the experiment '{EXPERIMENT}' of '{storage.tracking_shown}' has no finished training run",
        setting=setting,
        way_out=renamed or "run the flow train first",
    )


def download_weights(storage: Storage, run: RunRef, folder: Path) -> Path:
    """Copy the model that a run logged into `folder`, and return the file with its weights.

    Raises:
        WrongInput: The run has logged no model.
    """
    model_id = whole_model(storage, run)
    if model_id is None:
        raise WrongInput(
            f"run_id is '{run.run_id}', which has logged no model", setting="run_id", way_out="give another run"
        )
    files = repository(storage, client_of(storage).get_logged_model(model_id).artifact_location)
    package = folder / run.run_id
    package.mkdir(parents=True, exist_ok=True)
    return next(Path(files.download_artifacts("", str(package))).rglob(WEIGHTS_FILE))


def promotable_runs(storage: Storage, table: TableRef | None = None) -> list[RunRef]:
    """Return the newest finished run and every other finished run on the same cache, the newest first.

    Trials of a hyper-parameter search count only once their settings were chosen: the maximum over many trials is
    higher than their accuracy on new images.

    Args:
        storage: Storage with the tracking URI.
        table: The table whose runs count; None if it cannot be read, as after it was deleted. Then the runs on a
            table at `storage.tables` count, or if there are none, all runs.

    Raises:
        WrongInput: There are finished runs, and none was trained on `table`.
    """
    found = _finished_runs(storage)
    candidates = [run for run in found if TRIAL_TAG not in run.data.tags or CHOSEN_TAG in run.data.tags]
    if not candidates:
        return []
    path = storage.table("images") if table is None else table.path
    own = [run for run in candidates if _was_trained_on(run, path, "" if table is None else table.table_id)]
    if table is not None and not own:
        raise WrongInput(
            f"run_ids is empty, and none of the {len(candidates)} finished runs was trained on the table '{path}'",
            setting="run_ids",
            way_out="give run_ids, or the storage.tables of the runs",
        )
    candidates = own or candidates
    digest = candidates[0].data.params[CACHE_PARAM]
    return [RunRef(run_id=run.info.run_id) for run in candidates if run.data.params[CACHE_PARAM] == digest]


def _finished_runs(storage: Storage) -> Iterator[Run]:
    """Return the finished training runs, the newest first, without those of release 0.1.0 and of other programs."""
    client, experiments = client_of(storage), [prepare_tracking(storage)]
    wanted, order = "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0", ["attributes.start_time DESC"]
    found: Iterator[Run] = all_results(
        lambda token: client.search_runs(experiments, wanted, order_by=order, page_token=token)
    )
    return (run for run in found if OLD_MODEL_TAG not in run.data.tags and CACHE_PARAM in run.data.params)


def _was_trained_on(run: Run, path: str, table_id: str) -> bool:
    """Return whether the run recorded this table, by its id in a home that was moved, or by the path of a new table."""
    params = run.data.params
    return bool(params.get("data.table") == path or (table_id and params.get("data.table_id") == table_id))


def mark_chosen(storage: Storage, run: RunRef) -> None:
    """Tag a finished run that was trained as a trial, and is asked for outside its search."""
    client = client_of(storage)
    if TRIAL_TAG in client.get_run(run.run_id).data.tags:
        client.set_tag(run.run_id, CHOSEN_TAG, "true")
