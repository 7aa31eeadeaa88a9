"""The model package as a logged model of MLflow, with a copy of the code that loads it."""

import hashlib
import logging
import os
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
from mlflow.entities import RunTag
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array

from tasks import model_package
from tasks.model_package.description import TOP_K
from tasks.tracking.classifier_files import file_digests

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
        ]
    ),
    params=ParamSchema(
        [
            ParamSpec("top_k", DataType.long, TOP_K),
            ParamSpec("min_probability", DataType.double, 0.0),
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


def log_package(run_id: str, folder: Path) -> None:
    """Log the model package in `folder`, as `save_classifier` wrote it, to the active MLflow run.

    Args:
        run_id: Id of the active run, which gets the sha256 of the files as tags.
        folder: Folder of the package.
    """
    # Recorded here, where the files are trusted: files that are fetched later are verified by these digests.
    mlflow.MlflowClient().log_batch(
        run_id, tags=[RunTag(name, sha256) for name, sha256 in file_digests(folder).items()]
    )
    # Else MLflow adds the lock file of whatever project the current folder belongs to.
    os.environ.setdefault("MLFLOW_UV_AUTO_DETECT", "false")
    # Environments created by uv have no pip, about which MLflow warns for every model.
    logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)
    with warnings.catch_warnings(), TemporaryDirectory(prefix="lakevision-code-") as scratch:
        # The signature is explicit; an example image in every model would not add to it.
        warnings.filterwarnings("ignore", message=".*input example.*", category=UserWarning)
        code = carried_code(Path(scratch))
        mlflow.pyfunc.log_model(
            name="model",
            loader_module=f"{code.name}.pyfunc",
            data_path=str(folder),
            code_paths=[str(code)],
            signature=SIGNATURE,
            pip_requirements=[f"{name}=={version(name)}" for name in ("mlflow", *model_package.REQUIREMENTS)],
        )
