"""The model package as a logged model of MLflow, with a copy of the code that loads it."""

import hashlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, RunTag
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array

from tasks import model_package
from tasks.model_package.description import DESCRIPTION_FILE, TIMM, TOP_K
from tasks.storage import Storage
from tasks.tracking.classifier_files import file_digests
from tasks.tracking.files import repository
from tasks.tracking.runs import SYSTEM_METRICS, context_tags
from tasks.tracking.server import client_of, log_metrics

SIGNATURE = ModelSignature(
    # Bytes, or base64 text over HTTP: of a binary column, MLflow decodes broken base64 to other bytes without an error.
    inputs=Schema([ColSpec(AnyType(), "content")]),
    outputs=Schema(
        [
            ColSpec(DataType.string, "label"),
            ColSpec(DataType.long, "index"),
            ColSpec(DataType.double, "probability"),
            ColSpec(Array(DataType.string), "top_labels"),
            ColSpec(Array(DataType.double), "top_probabilities"),
            ColSpec(DataType.string, "error"),
            ColSpec(DataType.double, "unknown_score"),
        ]
    ),
    params=ParamSchema(
        [
            ParamSpec("top_k", DataType.long, TOP_K),
            *(ParamSpec(name, DataType.double, 0.0) for name in ("min_probability", "unknown_rate")),
        ]
    ),
)


def carried_code(folder: Path) -> Path:
    """Copy the code of the model package into `folder`, under a name that follows from its content; return the copy.

    A process may load models that carry different versions of the code, and one name would be one module in them all.
    """
    source = Path(model_package.__file__).parent
    files = sorted(source.glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    copy = folder / f"lakevision_model_{digest.hexdigest()[:12]}"
    copy.mkdir()
    for file in files:
        shutil.copyfile(file, copy / file.name)
    return copy


def log_package(storage: Storage, run_id: str, folder: Path) -> None:
    """Log the model package in `folder`, as `save_classifier` wrote it, to a running MLflow run.

    MLflow's own `log_model` logs to the active run of its fluent API, at the tracking URI of that.

    Args:
        storage: Storage with the tracking URI.
        run_id: Id of the run, which gets the sha256 of the files as tags.
        folder: Folder of the package.
    """
    # Recorded here, where the files are trusted: files that are fetched later are verified by these digests.
    tags = [RunTag(name, sha256) for name, sha256 in file_digests(folder).items()]
    client_of(storage).log_batch(run_id, tags=tags)
    # Within the name of a class, a quote would have a backslash.
    has_timm = f'"model": "{TIMM}' in (folder / DESCRIPTION_FILE).read_text()
    names = [name for name in model_package.REQUIREMENTS if name != "timm" or has_timm]
    with _logged_model(storage, run_id) as logged, TemporaryDirectory(prefix="lakevision-code-") as scratch:
        code = carried_code(Path(scratch))
        with _without_warnings():
            mlflow.pyfunc.save_model(
                path=f"{scratch}/model",
                loader_module=f"{code.name}.pyfunc",
                data_path=str(folder),
                code_paths=[str(code)],
                mlflow_model=Model(
                    logged.artifact_location, run_id, model_uuid=logged.model_id, model_id=logged.model_id
                ),
                signature=SIGNATURE,
                pip_requirements=[f"{name}=={version(name)}" for name in ("mlflow", *names)],
                # It has no lock file: else MLflow adds that of whatever project the current folder belongs to.
                uv_project_path=scratch,
            )
        repository(storage, logged.artifact_location).log_artifacts(f"{scratch}/model")


@contextmanager
def _logged_model(storage: Storage, run_id: str) -> Iterator[LoggedModel]:
    """Create a model of a run, with the run's parameters and first metrics; it is ready, or failed after an error."""
    client = client_of(storage)
    run = client.get_run(run_id)
    logged = client.create_logged_model(run.info.experiment_id, "model", run_id, context_tags(), run.data.params)
    try:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
        names = [name for name in run.data.metrics if not name.startswith(SYSTEM_METRICS)]
        history = [found for name in names for found in client.get_metric_history(run_id, name)]
        metrics = [
            Metric(found.key, found.value, found.timestamp, found.step, model_id=logged.model_id, run_id=run_id)
            for found in history
            if found.step == 0
        ]
        log_metrics(storage, run_id, metrics)
        yield logged
    except Exception:
        client.finalize_logged_model(logged.model_id, LoggedModelStatus.FAILED)
        raise
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence MLflow's warnings about parts that a package leaves out on purpose."""
    # Environments created by uv have no pip, about which MLflow warns for every model.
    environment = logging.getLogger("mlflow.utils.environment")
    level = environment.level
    environment.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # The signature is explicit; an example image in every model would not add to it.
            warnings.filterwarnings("ignore", message=".*input example.*", category=UserWarning)
            yield
    finally:
        environment.setLevel(level)
