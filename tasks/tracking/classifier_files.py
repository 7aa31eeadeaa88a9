"""The files of a registered model, fetched as data: the named ones alone, bounded, and by their digests.

Nothing of MLflow's own loading is used: `MLmodel` may name code and pickles, and paths that lead elsewhere.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

from tasks.errors import WrongInput
from tasks.refs import ModelRef
from tasks.storage import Storage
from tasks.tracking.server import away_named, client_of

DIGEST_TAG = "lakevision.sha256."
"""What the tags begin with that say the sha256 of a model's files, on its run and on its version."""

ARTIFACTS = "artifacts"
"""Folder of a logged model in which MLflow keeps the files that `log_model` was given."""

PLAIN_FOLDER = re.compile(rf"{ARTIFACTS}/[A-Za-z0-9_][A-Za-z0-9_.-]*")


def file_digests(folder: Path) -> dict[str, str]:
    """Return the tags that say the sha256 of every file in `folder`."""
    return {f"{DIGEST_TAG}{file.name}": _digest(file) for file in sorted(folder.iterdir())}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fetch_files(storage: Storage, uri: str, named: str, limits: Mapping[str, int], folder: Path) -> Path:
    """Copy the named files of a logged or registered model into `folder`, and nothing else.

    Args:
        storage: Where tracking lies.
        uri: `models:/...`.
        named: What the model is called in messages.
        limits: Most bytes of each file, by name.
        folder: Created where it is missing.

    Raises:
        WrongInput: A file is missing, too large, or no plain file inside the model's folder.
        TrackingAway: The tracking server does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with away_named(storage):
        try:
            _fetch(storage, uri, named, limits, folder)
        except MlflowException as error:
            if error.error_code not in {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"}:
                raise
            raise WrongInput(f"the files of {named} cannot be read ({error}): promote another run") from None
    return folder


def _fetch(storage: Storage, uri: str, named: str, limits: Mapping[str, int], folder: Path) -> None:
    client_of(storage)
    repository = get_artifact_repository(ModelsArtifactRepository.get_underlying_uri(uri))
    folders = [found.path for found in repository.list_artifacts(ARTIFACTS) if found.is_dir]
    contents = {path: {Path(file.path).name: file for file in repository.list_artifacts(path)} for path in folders}
    holding = [path for path, files in contents.items() if limits.keys() <= files.keys()]
    if len(holding) != 1:
        raise WrongInput(
            f"{named} has {len(holding)} folders with {' and '.join(limits)} below '{ARTIFACTS}', where a model of "
            "this project has one: register a run of the flow train with the flow promote"
        )
    if not PLAIN_FOLDER.fullmatch(holding[0]):
        raise WrongInput(f"{named} has its files in {holding[0]!r}, which is no plain name: promote another run")
    for name, most in limits.items():
        size = contents[holding[0]][name].file_size or 0
        if size <= most:
            path, root = f"{holding[0]}/{name}", folder / "download"
            if isinstance(repository, LocalArtifactRepository):
                root = Path(repository.artifact_dir)
                found = root / path
            else:
                root.mkdir(exist_ok=True)
                found = Path(repository.download_artifacts(path, str(root)))
            _check_plain(found, root, f"{named} has a file {name}")
            size = found.stat().st_size
        if size > most:
            raise WrongInput(
                f"{named} has a file {name} of {size} bytes, and {most} is the most it can have: promote another run"
            )
        shutil.copyfile(found, folder / name, follow_symlinks=False)
    shutil.rmtree(folder / "download", ignore_errors=True)


def _check_plain(file: Path, root: Path, what: str) -> None:
    """Refuse what is no regular file at exactly its place below `root`.

    Raises:
        WrongInput: It is a link, or one of its folders is.
    """
    place = Path(os.path.realpath(root)) / os.path.relpath(file, root)
    if os.path.realpath(file) != str(place) or not stat.S_ISREG(file.lstat().st_mode):
        raise WrongInput(f"{what}, which is no plain file of the model's own folder: promote another run")


def check_registered(tags: Mapping[str, str], model: ModelRef, names: Collection[str]) -> None:
    """Refuse a version without the digests that this project notes of these files when it registers one.

    Raises:
        WrongInput: Names the version, the tag and the way out.
    """
    lacking = [name for name in names if f"{DIGEST_TAG}{name}" not in tags]
    if lacking:
        raise WrongInput(
            f"{model.name} version {model.version} has no tag {DIGEST_TAG}{lacking[0]}, so it was not registered by "
            f"this project's flow promote, or by an older one: run the flow promote with run_ids ['{model.run_id}'], "
            "or give another model"
        )


def fetch_registered(storage: Storage, model: ModelRef, limits: Mapping[str, int], folder: Path) -> Path:
    """Copy the named files of a registered version into `folder`, each with the sha256 that its tag says.

    Raises:
        WrongInput: As `fetch_files`; the version has no such tag, or a file has another sha256.
        TrackingAway: The tracking server does not answer.
    """
    named = f"{model.name} version {model.version}"
    with away_named(storage):
        tags = client_of(storage).get_model_version(model.name, str(model.version)).tags
    check_registered(tags, model, limits)
    fetch_files(storage, f"models:/{model.name}/{model.version}", named, limits, folder)
    for name in limits:
        wanted, found = tags[f"{DIGEST_TAG}{name}"], _digest(folder / name)
        if found != wanted:
            raise WrongInput(
                f"{named} has a file {name} with the sha256 {found}, but was registered with {wanted}: it was changed "
                "since and is not used; restore it, or train and promote again"
            )
    return folder
