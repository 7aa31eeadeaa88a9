"""MLflow runs of data validations: logging and lookup."""

from typing import Any

import mlflow

from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.runs import FLOW_SOURCE_TAG, KEY_TAG, end_abandoned_runs, find_finished_run
from tasks.tracking.server import client_of, prepare_data_tracking, prepare_tracking

CHECKS_FILE = "data_validation.json"


def log_data_checks(
    storage: Storage,
    name: str,
    key: str,
    checks: dict[str, Any],
    tables: dict[str, list[dict[str, Any]]],
    metrics: dict[str, float],
    tags: dict[str, str],
) -> RunRef:
    """Log the validation of a version of the tables as a separate run; tables without rows are left out."""
    experiment, client = prepare_data_tracking(storage), client_of(storage)
    end_abandoned_runs(storage, key, None, [experiment])
    run = client.create_run(experiment, tags={KEY_TAG: key, FLOW_SOURCE_TAG: "flows.etl", **tags}, run_name=name)
    run_id = run.info.run_id
    for metric, value in metrics.items():
        client.log_metric(run_id, metric, value)
    for table, rows in tables.items():
        if rows:
            client.log_table(run_id, {column: [row[column] for row in rows] for column in rows[0]}, f"{table}.json")
    # Last, so that a finished run is complete.
    client.log_dict(run_id, checks, CHECKS_FILE)
    client.set_terminated(run_id)
    return RunRef(run_id=run_id)


def find_data_checks(storage: Storage, key: str) -> dict[str, Any] | None:
    """Return the checks that `log_data_checks` logged under this key, or None."""
    # Earlier versions of this code logged them among the training runs.
    found = find_finished_run(storage, key, experiments=[prepare_data_tracking(storage), prepare_tracking(storage)])
    if found is None:
        return None
    logged: dict[str, Any] = mlflow.artifacts.load_dict(f"runs:/{found.run_id}/{CHECKS_FILE}")
    return logged
