"""The MLflow run of a hyper-parameter search, the parent of the runs of its trials."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunStatus
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from tasks.config.frozen import flat_params
from tasks.refs import TRIAL_TAG
from tasks.storage import Storage
from tasks.tracking.files import log_json
from tasks.tracking.runs import KEY_TAG, log_settings, runs_with_key
from tasks.tracking.server import client_of, log_metrics, prepare_writing

PRUNED_TAG = "lakevision.pruned"


@dataclass(frozen=True)
class ParentRun:
    """The running MLflow run of a hyper-parameter search."""

    run_id: str
    storage: Storage
    client: MlflowClient

    def log_search(
        self, rows: list[dict[str, Any]], number: int, values: dict[str, Any], best: float, metric: str
    ) -> None:
        """Log all trials as `trials.json`, and the best trial, which a resumed search may replace.

        Args:
            rows: One row per trial.
            number: Number of the best trial.
            values: Settings of the best trial, by name.
            best: Metric of the best trial.
            metric: Name of the metric.
        """
        log_json(self.storage, self.run_id, {"trials": rows}, "trials.json")
        now = int(time.time() * 1000)
        log_metrics(self.storage, self.run_id, [Metric(f"best_{metric}", best, now, len(rows))])
        # Tags and not parameters, which cannot be changed.
        for name, value in {"trial": number, **values}.items():
            self.client.set_tag(self.run_id, f"lakevision.best.{name}", value)

    def end_trial(self, number: int) -> None:
        """Mark the run of a trial as killed unless it is finished; its process has ended or is about to."""
        for run in self.client.search_runs(
            [self.client.get_run(self.run_id).info.experiment_id],
            f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{self.run_id}' AND tags.`{TRIAL_TAG}` = '{number}'",
        ):
            _kill(self.client, run)


@contextmanager
def parent_run(
    storage: Storage, name: str, key: str, about: dict[str, Any], tags: dict[str, str]
) -> Iterator[ParentRun]:
    """Create or resume the MLflow run of a search, which ends as finished, failed or killed.

    It is not MLflow's active run, since the runs of the trials are created in other processes.
    """
    experiment, client = prepare_writing(storage).experiment_id, client_of(storage)
    known = runs_with_key(storage, key)
    if known:
        run = known[0]
        client.update_run(run.info.run_id, status=RunStatus.to_string(RunStatus.RUNNING))
    else:
        run = client.create_run(experiment, tags={KEY_TAG: key}, run_name=name)
    run_id = str(run.info.run_id)
    log_settings(storage, run, about, flat_params(about), {})
    for tag, text in tags.items():
        client.set_tag(run_id, tag, text)
    try:
        yield ParentRun(run_id, storage, client)
    except Exception:
        client.set_terminated(run_id, RunStatus.to_string(RunStatus.FAILED))
        raise
    except BaseException:
        client.set_terminated(run_id, RunStatus.to_string(RunStatus.KILLED))
        raise
    client.set_terminated(run_id)


def trial_tags(parent_run_id: str, number: int | None) -> dict[str, str]:
    """Return the tags of a trial's run, which MLflow shows below the run of the search."""
    return {MLFLOW_PARENT_RUN_ID: parent_run_id, TRIAL_TAG: str(number)}


def find_newest_run(storage: Storage, key: str) -> str | None:
    """Return the id of the newest run with this key, whatever its status, or None."""
    runs = runs_with_key(storage, key)
    return str(runs[0].info.run_id) if runs else None


def mark_pruned(storage: Storage, key: str) -> str | None:
    """Tag the newest run with this key, whose process has ended, as pruned; return its id, or None."""
    client, run_id = client_of(storage), find_newest_run(storage, key)
    if run_id is not None:
        client.set_tag(run_id, PRUNED_TAG, "true")
        # In case its process did not do so within the seconds that it had.
        _kill(client, client.get_run(run_id))
    return run_id


def _kill(client: MlflowClient, run: Run) -> None:
    """Mark a run as killed unless it is finished: a finished run has a model that may be promoted."""
    if run.info.status != RunStatus.to_string(RunStatus.FINISHED):
        client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))
