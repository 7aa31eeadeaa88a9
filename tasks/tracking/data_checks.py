"""MLflow runs of data validations: logging and lookup."""

import time
from typing import Any

from mlflow.entities import Metric

from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.files import log_json, log_table, read_json
from tasks.tracking.runs import FLOW_SOURCE_TAG, KEY_TAG, end_abandoned_runs, find_finished_run
from tasks.tracking.server import client_of, log_metrics, prepare_data_tracking, prepare_tracking

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
    now = int(time.time() * 1000)
    log_metrics(storage, run_id, [Metric(metric, value, now, 0) for metric, value in metrics.items()])
    for table, rows in tables.items():
        if rows:
            log_table(storage, run_id, {column: [row[column] for row in rows] for column in rows[0]}, f"{table}.json")
    # Last, so that a finished run is complete.
    log_json(storage, run_id, checks, CHECKS_FILE)
    client.set_terminated(run_id)
    return RunRef(run_id=run_id)


def find_data_checks(storage: Storage, key: str) -> dict[str, Any] | None:
    """Return the checks that `log_data_checks` logged under this key, or None."""
    # Earlier versions of this code logged them among the training runs.
    found = find_finished_run(storage, key, experiments=[prepare_data_tracking(storage), prepare_tracking(storage)])
    return None if found is None else read_json(storage, found.run_id, CHECKS_FILE)
