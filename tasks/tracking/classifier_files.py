"""Download of a registered model's files as data: by name, of bounded size, verified by sha256.

MLflow's model loading is not used: `MLmodel` may refer to code, pickles and paths outside the model's folder.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from tasks.errors import WrongInput
from tasks.model_package.description import FILE_LIMITS, file_sha256
from tasks.refs import ModelRef
from tasks.storage import Storage
from tasks.tracking.files import repository
from tasks.tracking.server import WORK_IS_KEPT, client_of, is_missing, translate_outage

DIGEST_TAG = "lakevision.sha256."
"""Prefix of the tags with the sha256 of a model's files, on its run and on its version."""

OLD_MODEL_TAG = f"{DIGEST_TAG}weights.pt"
"""Tag of the runs and versions of release 0.1.0, whose models have their weights in a pickle."""

ARTIFACTS = "data"
"""Folder of a logged model in which MLflow stores the folder passed to `log_model`."""

PLAIN_FOLDER = re.compile(rf"{ARTIFACTS}/[A-Za-z0-9_][A-Za-z0-9_.-]*")


def file_digests(folder: Path) -> dict[str, str]:
    """Return the tags with the sha256 of every file in `folder`."""
    return {f"{DIGEST_TAG}{file.name}": file_sha256(file) for file in sorted(folder.iterdir())}


def fetch_files(
    storage: Storage, locate: Callable[[], str], named: str, limits: Mapping[str, int], folder: Path
) -> Path:
    """Copy the named files of a logged or registered model into `folder`, and no others.

    Args:
        storage: Storage with the tracking URI.
        locate: Returns the location of the model's files, from MLflow.
        named: Name of the model in messages.
        limits: Maximum size of each file in bytes, by file name.
        folder: Destination; created if it is missing.

    Raises:
        WrongInput: A file is missing, too large, or not a regular file inside the model's folder.
        TrackingUnavailable: The tracking server does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with translate_outage(storage, WORK_IS_KEPT):
        try:
            _fetch(storage, locate(), named, limits, folder)
        except MlflowException as error:
            if not is_missing(error):
                raise
            raise WrongInput(f"the files of {named} cannot be read ({error})", way_out="promote another run") from None
    return folder


def _fetch(storage: Storage, location: str, named: str, limits: Mapping[str, int], folder: Path) -> None:
    files = repository(storage, location)
    if isinstance(files, LocalArtifactRepository) and not Path(files.artifact_dir).is_dir():
        raise WrongInput(
            f"{named} has its files in '{files.artifact_dir}', which is not a folder on this machine, whose home is "
            f"'{storage.home}'",
            way_out="bring it back to that path or mount it there, or promote another run",
        )
    folders = [found.path for found in files.list_artifacts(ARTIFACTS) if found.is_dir]
    contents = {path: {Path(file.path).name: file for file in files.list_artifacts(path)} for path in folders}
    matching = [path for path, files in contents.items() if limits.keys() <= files.keys()]
    if len(matching) != 1:
        raise WrongInput(
            f"{named} has {len(matching)} folders with {' and '.join(limits)} below '{ARTIFACTS}', but a model of "
            "this project has exactly one",
            way_out="register a run of the flow train with the flow promote",
        )
    if not PLAIN_FOLDER.fullmatch(matching[0]):
        raise WrongInput(
            f"{named} has its files in {matching[0]!r}, which is not a plain name", way_out="promote another run"
        )
    for name, max_bytes in limits.items():
        size = contents[matching[0]][name].file_size or 0
        if size <= max_bytes:
            path, root = f"{matching[0]}/{name}", folder / "download"
            if isinstance(files, LocalArtifactRepository):
                root = Path(files.artifact_dir)
                found = root / path
            else:
                root.mkdir(exist_ok=True)
                found = Path(files.download_artifacts(path, str(root)))
            _check_regular_file(found, root, f"{named} has a file {name}")
            size = found.stat().st_size
        if size > max_bytes:
            raise WrongInput(
                f"{named} has a file {name} of {size} bytes, of which the maximum is {max_bytes}",
                way_out="promote another run",
            )
        shutil.copyfile(found, folder / name, follow_symlinks=False)
    shutil.rmtree(folder / "download", ignore_errors=True)


def _check_regular_file(file: Path, root: Path, what: str) -> None:
    """Check that a file is a regular file below `root`, without links in its path.

    Raises:
        WrongInput: It is not a regular file, or it or one of its folders is a link.
    """
    expected = Path(os.path.realpath(root)) / os.path.relpath(file, root)
    if os.path.realpath(file) != str(expected) or not stat.S_ISREG(file.lstat().st_mode):
        raise WrongInput(
            f"{what}, which is not a regular file in the model's own folder", way_out="promote another run"
        )


def check_registered(tags: Mapping[str, str], model: ModelRef, names: Collection[str] = FILE_LIMITS.keys()) -> None:
    """Check that a version has the digest tags that this project sets when it registers a model.

    Raises:
        WrongInput: A tag is missing; the message names the version and the tag.
    """
    lacking = [name for name in names if f"{DIGEST_TAG}{name}" not in tags]
    if lacking and OLD_MODEL_TAG in tags:
        raise WrongInput(
            f"{model.name} version {model.version} is a model of release 0.1.0, which is not loaded any more",
            way_out="train and promote again",
        )
    if lacking:
        raise WrongInput(
            f"{model.name} version {model.version} has no tag {DIGEST_TAG}{lacking[0]}, so it was not registered by "
            "this project's flow promote, or by an older one",
            way_out=f"run the flow promote with run_ids ['{model.run_id}'], or give another model",
        )


def fetch_registered(storage: Storage, model: ModelRef, folder: Path, limits: Mapping[str, int] = FILE_LIMITS) -> Path:
    """Copy the files of a registered version into `folder`, and verify each by the sha256 in its tag.

    Args:
        storage: Storage with the tracking URI.
        model: The version.
        folder: Destination; created if it is missing.
        limits: As for `fetch_files`; by default the whole package.

    Raises:
        WrongInput: As `fetch_files`; a tag is missing, or a file has another sha256.
        TrackingUnavailable: The tracking server does not answer.
    """
    named = f"{model.name} version {model.version}"
    client, number = client_of(storage), str(model.version)
    with translate_outage(storage, WORK_IS_KEPT):
        tags = client.get_model_version(model.name, number).tags
    check_registered(tags, model, limits)
    fetch_files(storage, lambda: client.get_model_version_download_uri(model.name, number), named, limits, folder)
    for name in limits:
        wanted, found = tags[f"{DIGEST_TAG}{name}"], file_sha256(folder / name)
        if found != wanted:
            raise WrongInput(
                f"{named} has a file {name} with the sha256 {found}, but was registered with {wanted}",
                way_out="it was changed since then and is not used; restore it, or train and promote again",
            )
    return folder
