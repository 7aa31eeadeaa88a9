"""MLflow runs of training and of data validations: lookup, settings and provenance, and the end of abandoned ones."""

import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from mlflow.entities import Metric, Param, Run, RunStatus, ViewType
from mlflow.tracking.context.registry import resolve_tags
from mlflow.tracking.context.system_environment_context import SystemEnvironmentContext
from mlflow.utils.mlflow_tags import MLFLOW_SOURCE_NAME

import tasks
from tasks.environment import code_version
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.classifier_files import OLD_MODEL_TAG
from tasks.tracking.experiments import DATA, TRAINING, run_page
from tasks.tracking.files import log_json, log_table, read_file, read_json, run_files
from tasks.tracking.server import (
    client_of,
    database_file,
    found_or_none,
    log_metrics,
    prepare_data_tracking,
    prepare_tracking,
    reachable,
    translate_outage,
)

logger = logging.getLogger("lakevision.tracking")

KEY_TAG = "lakevision.key"

CONFIG_FILE = "config.json"
"""File with all settings of a training run, from which it can be repeated."""

CODE_TAG = "lakevision.code_version"

VERSION_PARAM = "version."
"""Prefix of the parameters with the versions of packages."""

PLAN_TAG = "lakevision.plan"
"""Tag with the plan of the recipe's fine-tuning, as JSON."""

WHY_TAG = "lakevision.why"
"""Tag with the reason why the weights of a phase were chosen, as a sentence."""

BATCH_SIZE_TAG = "lakevision.batch_size.stage_"
"""Prefix of the tags with the automatically chosen batch size of each phase, by its number."""

RESUMED_WITH_CHANGES_TAG = "lakevision.resumed_with_changes"
"""Tag of a run that was resumed with another device, processor, number format, number of threads, code or packages.

Its value lists the differences from the run's parameters and CODE_TAG, with the old and the new values."""

CONTINUES_TAG = "lakevision.continues"
"""Tag of a run that continued another one with fewer epochs: the id of that run."""

RESTARTS_TAG = "lakevision.restarts"
"""Tag of a run whose ranks the launcher started again after a loss: the number of restarts of its last launch."""

SYSTEM_METRICS = "system/"
"""Prefix of the names of MLflow's system metrics."""

FLOW_RUN_TAG = "prefect.flow_run_id"

FLOW_SOURCE_TAG = MLFLOW_SOURCE_NAME
"""Tag with the flow for the column Source of MLflow's lists; by default it shows the file that a rank runs."""

LOGGED_PACKAGES = (
    "torch",
    "torchvision",
    "horovod",
    "petastorm",
    "pyspark",
    "delta-spark",
    "mlflow",
    "prefect",
    "numpy",
    "pyarrow",
    "pillow",
)

EndStatus = Literal["FAILED", "KILLED"]
"""Status of an MLflow run whose process ended without setting one."""


CHECKS_FILE = "data_validation.json"


def find_finished_run(storage: Storage, *keys: str, experiments: Sequence[str] | None = None) -> RunRef | None:
    """Return the finished run with the first of these keys that has one, or None.

    Args:
        storage: Storage with the tracking URI.
        keys: Keys of the run's inputs: its own, and that of older releases if it was another one.
        experiments: Ids of the experiments to search; None for that of the training runs.

    Raises:
        TrackingUnavailable: The server did not answer within MLflow's retries.
    """
    with translate_outage(storage):
        runs = [run for key in keys for run in runs_with_key(storage, key, experiments)]
    finished = [run for run in runs if run.info.status == RunStatus.to_string(RunStatus.FINISHED)]
    # Their models are not loaded any more: they are trained again.
    finished = [run for run in finished if OLD_MODEL_TAG not in run.data.tags]
    return RunRef(run_id=finished[0].info.run_id) if finished else None


def has_run(storage: Storage, run_id: str) -> bool:
    """Return whether the run exists on the tracking server and is not deleted.

    Raises:
        TrackingUnavailable: The server does not answer.
    """
    with translate_outage(storage):
        found = found_or_none(client_of(storage).get_run, run_id)
    return found is not None and found.info.lifecycle_stage == "active"


def runs_with_key(storage: Storage, key: str, experiments: Sequence[str] | None = None) -> list[Run]:
    """Return the runs with this key that are not deleted, the newest first; arguments as for `find_finished_run`."""
    within = list(experiments or [prepare_tracking(storage)])
    return list(
        client_of(storage).search_runs(within, f"tags.`{KEY_TAG}` = '{key}'", run_view_type=ViewType.ACTIVE_ONLY)
    )


def find_unfinished_run(storage: Storage, key: str) -> str | None:
    """Return the id of the newest unfinished run with this key that has no training metrics yet, or None.

    Its process ended before its first checkpoint. The next process with the same inputs continues in this run, so that
    a training run has one MLflow run however often it is killed. A run of other code or package versions is skipped,
    since its parameters and tags would be wrong for the continued run.
    """
    code, versions = code_commit(), version_params()
    for run in runs_with_key(storage, key):
        params, tags = run.data.params, run.data.tags
        measured = [name for name in run.data.metrics if not name.startswith(SYSTEM_METRICS)]
        same = tags.get(CODE_TAG, code) == code and all(
            params.get(name, versions[name]) == versions[name] for name in versions
        )
        if run.info.status != RunStatus.to_string(RunStatus.FINISHED) and not measured and same:
            return str(run.info.run_id)
    return None


def version_params() -> dict[str, str]:
    """Return the versions of packages as parameters of a run."""
    return {f"{VERSION_PARAM}{package}": found for package, found in package_versions().items()}


def values_below(values: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the parameters or tags of a run whose names have a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def end_abandoned_runs(storage: Storage, key: str, keep: str | None, experiments: Sequence[str] | None = None) -> None:
    """Mark running runs with this key as killed, except `keep`; the caller holds the key's lock, so none is alive."""
    for run in runs_with_key(storage, key, experiments):
        if run.info.status == RunStatus.to_string(RunStatus.RUNNING) and run.info.run_id != keep:
            logger.info("MLflow run %s was abandoned by a killed process: marked as killed", run.info.run_id)
            client_of(storage).set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))


def context_tags() -> dict[str, str]:
    """Return MLflow's tags of a new run or model, such as its user, without those of $MLFLOW_RUN_CONTEXT."""
    found: dict[str, str] = resolve_tags(ignore=[SystemEnvironmentContext])
    return found


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that the result of a training run may depend on."""
    return {package: version(package) for package in LOGGED_PACKAGES}


def code_commit() -> str | None:
    """Return the commit of the code, from the image's environment or else from the git checkout, or None."""
    if given := code_version():
        return given
    command = ["git", "-C", str(Path(tasks.__file__).parent), "rev-parse", "--quiet", "--verify", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def log_settings(
    storage: Storage, run: Run, config: dict[str, Any], params: Mapping[str, Any], tags: Mapping[str, str]
) -> None:
    """Log the settings of a run, which keeps the parameters that it already has.

    Args:
        storage: Storage with the tracking URI.
        run: The run.
        config: Content of its file with all settings.
        params: Its parameters.
        tags: Its tags, which are set if a parameter is missing.
    """
    missing = [Param(name, str(value)) for name, value in params.items() if name not in run.data.params]
    if missing:
        log_json(storage, run.info.run_id, config, CONFIG_FILE)
        # The parameters last: if the process is killed before, the next one finds them missing.
        client = client_of(storage)
        for name, value in tags.items():
            client.set_tag(run.info.run_id, name, value)
        client.log_batch(run.info.run_id, params=missing)


def run_metrics(storage: Storage, run: RunRef) -> dict[str, float]:
    """Return the last value of every metric of a run."""
    with translate_outage(storage):
        return dict(client_of(storage).get_run(run.run_id).data.metrics)


def run_params(storage: Storage, run: RunRef) -> dict[str, str]:
    """Return the parameters of a run; none if it does not exist any more."""
    found = _found_run(storage, run)
    return {} if found is None else dict(found.data.params)


def run_tag(storage: Storage, run: RunRef, name: str) -> str:
    """Return a tag of a run; empty if it has none, or does not exist any more."""
    found = _found_run(storage, run)
    return "" if found is None else str(found.data.tags.get(name, ""))


def run_seconds(storage: Storage, run: RunRef) -> float:
    """Return the time from the start of a finished run to its end, in seconds."""
    found = _found_run(storage, run)
    return 0.0 if found is None else (found.info.end_time - found.info.start_time) / 1000


def _found_run(storage: Storage, run: RunRef) -> Run | None:
    with translate_outage(storage):
        return found_or_none(client_of(storage).get_run, run.run_id)


def read_artifact(storage: Storage, run: RunRef, name: str) -> bytes | None:
    """Return the content of a file in the run's artifacts, or None if it or the run does not exist."""
    with translate_outage(storage):
        files = found_or_none(partial(run_files, storage), run.run_id)
        names = set() if files is None else {file.path for file in files.list_artifacts()}
        return read_file(storage, run.run_id, name) if name in names else None


def run_location(storage: Storage, run: RunRef) -> str:
    """Return the path of the run's page in MLflow's UI."""
    with translate_outage(storage):
        experiment = client_of(storage).get_run(run.run_id).info.experiment_id
    return run_page(experiment, run.run_id)


def end_lost_runs(storage: Storage, status: Callable[[str], EndStatus | None]) -> list[str]:
    """End the running MLflow runs of flow runs that have ended, and return their ids.

    Args:
        storage: Storage with the tracking URI.
        status: Returns the status for an MLflow run from the id of its flow run; None if that has not ended.

    Raises:
        TrackingUnavailable: The tracking server does not answer.
    """
    database = database_file(storage)
    if database is not None and not database.exists():  # A client would create it.
        return []
    client, ended = client_of(storage), []
    with reachable(storage):
        found = [client.get_experiment_by_name(experiment.name) for experiment in (TRAINING, DATA)]
        experiments = [str(experiment.experiment_id) for experiment in found if experiment is not None]
        runs = client.search_runs(experiments, "attributes.status = 'RUNNING'") if experiments else []
        for run in runs:
            flow_run = run.data.tags.get(FLOW_RUN_TAG)
            if flow_run is not None and (end := status(flow_run)) is not None:
                client.set_terminated(run.info.run_id, end)
                logger.info("MLflow run %s has lost its process: marked as %s", run.info.run_id, end)
                ended.append(str(run.info.run_id))
    return ended


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
