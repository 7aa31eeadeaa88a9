"""The MLflow run of a search for hyper-parameters, under which the runs of its trials are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run, RunStatus
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from tasks.storage import Storage
from tasks.tracking.runs import CONFIG_FILE, KEY_TAG, flat_params, runs_with_key
from tasks.tracking.server import client_of, prepare_tracking

PRUNED_TAG = "lakevision.pruned"
TRIAL_TAG = "lakevision.trial"


@dataclass(frozen=True)
class ParentRun:
    """The running MLflow run of a search."""

    run_id: str
    client: MlflowClient

    def log_search(
        self, rows: list[dict[str, Any]], number: int, values: dict[str, Any], best: float, metric: str
    ) -> None:
        """Log every trial as `trials.json`, and the best one, which a search that goes on may replace.

        Args:
            rows: A row a trial.
            number: Of the best trial.
            values: Its settings, by name.
            best: Its metric.
            metric: Name of the metric.
        """
        self.client.log_dict(self.run_id, {"trials": rows}, "trials.json")
        self.client.log_metric(self.run_id, f"best_{metric}", best, step=len(rows))
        # Tags and not parameters: those can never be changed.
        for name, value in {"trial": number, **values}.items():
            self.client.set_tag(self.run_id, f"lakevision.best.{name}", value)

    def end_trial(self, number: int) -> None:
        """End the run of a trial as killed, unless it is finished: its process was ended, or is about to be."""
        for run in self.client.search_runs(
            [self.client.get_run(self.run_id).info.experiment_id],
            f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{self.run_id}' AND tags.`{TRIAL_TAG}` = '{number}'",
        ):
            _kill(self.client, run)


@contextmanager
def parent_run(
    storage: Storage, name: str, key: str, about: dict[str, Any], tags: dict[str, str]
) -> Iterator[ParentRun]:
    """Open the MLflow run of a search, or go on with the one it has; it ends as finished, failed or killed.

    Not MLflow's active run: those of the trials are begun in other processes.
    """
    experiment, client = prepare_tracking(storage), client_of(storage)
    known = runs_with_key(storage, key)
    if known:
        run = known[0]
        client.update_run(run.info.run_id, status=RunStatus.to_string(RunStatus.RUNNING))
    else:
        run = client.create_run(experiment, tags={KEY_TAG: key}, run_name=name)
    run_id = str(run.info.run_id)
    _describe(client, run, about)
    for tag, text in tags.items():
        client.set_tag(run_id, tag, text)
    try:
        yield ParentRun(run_id, client)
    except Exception:
        client.set_terminated(run_id, RunStatus.to_string(RunStatus.FAILED))
        raise
    except BaseException:
        client.set_terminated(run_id, RunStatus.to_string(RunStatus.KILLED))
        raise
    client.set_terminated(run_id)


def _describe(client: MlflowClient, run: Run, about: dict[str, Any]) -> None:
    missing = {name: value for name, value in flat_params(about).items() if name not in run.data.params}
    if not missing:
        return
    # The parameters last: where a process was killed on the way here, the next search finds some missing.
    client.log_dict(run.info.run_id, about, CONFIG_FILE)
    for name, value in missing.items():
        client.log_param(run.info.run_id, name, value)


def trial_tags(parent_run_id: str, number: int | None) -> dict[str, str]:
    """Return the tags of a trial's run, which MLflow shows below that of the search."""
    return {MLFLOW_PARENT_RUN_ID: parent_run_id, TRIAL_TAG: str(number)}


def find_newest_run(storage: Storage, key: str) -> str | None:
    """Return the id of the newest run of exactly these inputs, whatever became of it, or None."""
    runs = runs_with_key(storage, key)
    return str(runs[0].info.run_id) if runs else None


def mark_pruned(storage: Storage, key: str) -> str | None:
    """Say of the newest run of this key, whose process has ended, that it was pruned; return its id, or None."""
    client = client_of(storage)
    runs = runs_with_key(storage, key)
    if not runs:
        return None
    client.set_tag(runs[0].info.run_id, PRUNED_TAG, "true")
    # Its process was given some seconds to say so itself.
    _kill(client, runs[0])
    return str(runs[0].info.run_id)


def _kill(client: MlflowClient, run: Run) -> None:
    """End a run as killed, unless it is finished: its model is there, and may be promoted."""
    if run.info.status != RunStatus.to_string(RunStatus.FINISHED):
        client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))
