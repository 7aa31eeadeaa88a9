"""MLflow runs: found again by what was trained, and ended."""

import logging
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.entities import Run, RunStatus, ViewType
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_SOURCE_NAME

import tasks
from tasks.environment import code_version
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.experiments import run_page
from tasks.tracking.server import away_named, client_of, prepare_tracking

logger = logging.getLogger("lakevision.tracking")

KEY_TAG = "lakevision.key"

CONFIG_FILE = "config.json"
"""What a training was given: enough to do it again."""

CODE_TAG = "lakevision.code_version"

VERSION_PARAM = "version."
"""What the parameters that say packages' versions begin with."""

BATCH_SIZE_TAG = "lakevision.batch_size.stage_"
"""What the tags begin with that say which batch size was chosen in a stage, where that was left to the training."""

RESUMED_WITH_CHANGES_TAG = "lakevision.resumed_with_changes"
"""Of a training that was gone on with on another device or processor, in another number format, with other threads,
code or packages than its parameters and CODE_TAG say: which, from what to what."""

SYSTEM_METRICS = "system/"
"""What the names of MLflow's own metrics of the machine begin with."""

FLOW_RUN_TAG = "prefect.flow_run_id"

FLOW_SOURCE_TAG = MLFLOW_SOURCE_NAME
"""What the column Source of MLflow's lists shows: the flow, where MLflow's default is the file that a rank runs."""

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


def find_finished_run(storage: Storage, key: str, experiments: Sequence[str] | None = None) -> RunRef | None:
    """Return the finished run of exactly these inputs, or None; without `experiments`, among the training runs.

    Raises:
        TrackingAway: The server has not answered for as long as MLflow tries.
    """
    with away_named(storage):
        runs = runs_with_key(storage, key, experiments)
    finished = [run for run in runs if run.info.status == RunStatus.to_string(RunStatus.FINISHED)]
    return RunRef(run_id=finished[0].info.run_id) if finished else None


def has_run(storage: Storage, run_id: str) -> bool:
    """Say whether the tracking server knows the run and nobody deleted it.

    Raises:
        TrackingAway: The server does not answer.
    """
    try:
        with away_named(storage):
            found = client_of(storage).get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return bool(found.info.lifecycle_stage == "active")


def runs_with_key(storage: Storage, key: str, experiments: Sequence[str] | None = None) -> list[Run]:
    """Return the runs of exactly these inputs that nobody deleted, the newest first."""
    within = list(experiments or [prepare_tracking(storage)])
    return list(
        client_of(storage).search_runs(within, f"tags.`{KEY_TAG}` = '{key}'", run_view_type=ViewType.ACTIVE_ONLY)
    )


def find_begun_run(storage: Storage, key: str) -> str | None:
    """Return the id of the newest run of exactly these inputs that was begun and has measured nothing, or None.

    Its process ended before its first checkpoint: whoever trains the same goes on with it, so that one training is one
    run however often it was killed. A run begun by other code or with other packages is left as it is, since what it
    says of them would be untrue of what comes.
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
    """Return the packages' versions as parameters of a run."""
    return {f"{VERSION_PARAM}{package}": found for package, found in package_versions().items()}


def versions_in(params: Mapping[str, str]) -> dict[str, str]:
    """Return the packages' versions that a run's parameters say, by package."""
    return {name.removeprefix(VERSION_PARAM): value for name, value in params.items() if name.startswith(VERSION_PARAM)}


def end_abandoned_runs(storage: Storage, key: str, keep: str | None, experiments: Sequence[str] | None = None) -> None:
    """Mark runs of this key as killed that no process can still be writing; the caller holds the key's lock."""
    for run in runs_with_key(storage, key, experiments):
        if run.info.status == RunStatus.to_string(RunStatus.RUNNING) and run.info.run_id != keep:
            logger.info("MLflow run %s was abandoned by a killed process: marked as killed", run.info.run_id)
            client_of(storage).set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a training may depend on."""
    return {package: version(package) for package in LOGGED_PACKAGES}


def code_commit() -> str | None:
    """Return the commit of the checkout this code lies in, or what the image says."""
    if given := code_version():
        return given
    command = ["git", "-C", str(Path(tasks.__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def flat_params(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as MLflow's parameters: names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flat_params(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def promotable_runs(storage: Storage) -> list[RunRef]:
    """Return the newest finished run and every other finished run on the same cache, the newest first."""
    experiment = prepare_tracking(storage)
    runs = client_of(storage).search_runs(
        [experiment],
        "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
        order_by=["attributes.start_time DESC"],
    )
    if not runs:
        return []
    digest = runs[0].data.params["cache.digest"]
    return [RunRef(run_id=run.info.run_id) for run in runs if run.data.params["cache.digest"] == digest]


def run_metrics(storage: Storage, run: RunRef) -> dict[str, float]:
    """Return the last value of every metric of a run."""
    with away_named(storage):
        return dict(client_of(storage).get_run(run.run_id).data.metrics)


def read_artifact(storage: Storage, run: RunRef, name: str) -> bytes | None:
    """Return the content of a file among the run's artifacts, or None where there is none of that name."""
    client = client_of(storage)
    with away_named(storage), TemporaryDirectory() as scratch:
        if name not in artifact_names(run.run_id):
            return None
        return Path(client.download_artifacts(run.run_id, name, scratch)).read_bytes()


def artifact_names(run_id: str) -> set[str]:
    """Return the names of the files at the root of a run's artifacts."""
    return {file.path for file in mlflow.artifacts.list_artifacts(run_id=run_id)}


def run_location(storage: Storage, run: RunRef) -> str:
    """Return where a person finds the run: the experiment and run in MLflow's UI."""
    with away_named(storage):
        experiment = client_of(storage).get_run(run.run_id).info.experiment_id
    return run_page(experiment, run.run_id)
