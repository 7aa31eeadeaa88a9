"""MLflow's model registry: versions with their aliases, tags and descriptions, and default names of models."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from mlflow.entities import LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS, MLFLOW_RUN_NOTE

from tasks.config.etl import BUILTIN_DIGITS
from tasks.errors import WrongInput
from tasks.model_package.description import FILE_LIMITS
from tasks.paths import readable_name
from tasks.refs import ModelRef, RunRef, TableRef
from tasks.storage import Storage
from tasks.tracking.classifier_files import DIGEST_TAG, fetch_files, file_digests
from tasks.tracking.registry_values import checked_run_id
from tasks.tracking.server import client_of, found_or_none, reachable
from tasks.tracking.trained_tables import table_tags

SOURCE_TAG = "lakevision.source"
"""Tag of a registered version with the source of the images in its table."""

PREVIOUS_TAG = "previous_champion"
"""Tag of a version that became the champion, with the number of the version that was the champion before."""

PROMOTION_TAG = "lakevision.promotion"
"""Tag of a version with the last decision on it, as a sentence."""

ROLLED_BACK_TAG = "lakevision.rolled_back"
"""Tag of a version that was rolled back, with the sentence that says so; promotions leave it out."""

NAME_PREFIX = "lakevision"

MAX_FOLDER_CHARACTERS = 40
"""Maximum number of characters of the folder's name in the name of a model."""

DESCRIPTION_TAG = MLFLOW_RUN_NOTE

MAX_RUN_DESCRIPTION = 8000
MAX_VERSION_DESCRIPTION = 5000
"""Column sizes of MLflow's database in characters; SQLite accepts longer texts, PostgreSQL rejects them."""

CUT_NOTE = "\n\n*Shortened: the whole text is the artifact `model_card.md` of the training run.*\n"


def whole_model(storage: Storage, run: RunRef) -> str | None:
    """Return the id of the newest complete model that a run logged, or None.

    A training run that is killed while it logs its model logs another one when it resumes; the first is incomplete.
    """
    client = client_of(storage)
    logged = [client.get_logged_model(output.model_id) for output in client.get_run(run.run_id).outputs.model_outputs]
    whole = [model for model in logged if model.status == LoggedModelStatus.READY]
    return str(max(whole, key=lambda model: model.creation_timestamp).model_id) if whole else None


def registered_version(storage: Storage, run: RunRef, name: str) -> ModelRef | None:
    """Return the version of the registered model `name` that was created from the run, or None."""
    for found in client_of(storage).search_model_versions(f"name = '{name}'"):
        if found.run_id == run.run_id:
            return ModelRef(name=name, version=int(found.version), run_id=run.run_id)
    return None


def rolled_back_runs(storage: Storage, name: str) -> set[str]:
    """Return the MLflow run ids of those versions of the registered model `name` that were rolled back."""
    versions = client_of(storage).search_model_versions(f"name = '{name}'")
    return {found.run_id for found in versions if ROLLED_BACK_TAG in found.tags}


def numbered_version(storage: Storage, name: str, number: str) -> ModelRef | None:
    """Return the version of the registered model `name` with this number, or None if it was deleted.

    Raises:
        WrongInput: The version does not name a valid MLflow run.
    """
    return _reference(name, found_or_none(client_of(storage).get_model_version, name, number))


def register_run(storage: Storage, run: RunRef, name: str) -> ModelRef:
    """Register the run's model under `name`, with the sha256 of its files as tags.

    A run that is already registered keeps its version, to which missing tags are added.

    Args:
        storage: Storage with the tracking URI.
        run: The run.
        name: Name of the registered model.

    Raises:
        WrongInput: The run has logged no model, or a model without these files.
    """
    client = client_of(storage)
    found = registered_version(storage, run, name)
    known = {} if found is None else client.get_model_version(name, str(found.version)).tags
    if found is not None and all(f"{DIGEST_TAG}{file}" in known for file in FILE_LIMITS):
        return found
    model_id = _logged_model(storage, run)
    digests = _logged_digests(storage, run)
    if found is None:
        logged = client.get_run(run.run_id).data
        # As tags of the version as well: maintenance needs those of the table if the run is purged.
        created = _create_version(storage, run, name, model_id, digests | table_tags(logged.params))
        if description := logged.tags.get(DESCRIPTION_TAG):
            # The model card, as the description of the version.
            client.update_model_version(name, created.version, fit_description(description, MAX_VERSION_DESCRIPTION))
        return ModelRef(name=name, version=int(created.version), run_id=run.run_id)
    tag_version(storage, found, digests)
    return found


def _create_version(storage: Storage, run: RunRef, name: str, model_id: str, tags: dict[str, str]) -> ModelVersion:
    """Create a version of a registered model from a logged model, which gets a link to it in MLflow's UI."""
    client = client_of(storage)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    logged = client.get_logged_model(model_id)
    # A server looks the model up. For a database MLflow would look it up at the tracking URI of its fluent API.
    source = f"models:/{model_id}" if storage.tracking.startswith("http") else logged.artifact_location
    created = client.create_model_version(name, source, run.run_id, tags, model_id=model_id)
    linked = json.loads(logged.tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
    linked.append({"name": created.name, "version": created.version})
    client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: json.dumps(linked)})
    return created


def fetch_logged(storage: Storage, run: RunRef, folder: Path, limits: Mapping[str, int] = FILE_LIMITS) -> Path:
    """Copy the files of the model that a run logged into `folder`, and no others.

    Args:
        storage: Storage with the tracking URI.
        run: The run.
        folder: Destination; created if it is missing.
        limits: As for `fetch_files`; by default the whole package.

    Raises:
        WrongInput: The run has logged no model, or a model without these files.
    """
    client, model_id, named = client_of(storage), _logged_model(storage, run), f"MLflow run '{run.run_id}'"
    return fetch_files(storage, lambda: str(client.get_logged_model(model_id).artifact_location), named, limits, folder)


def _logged_model(storage: Storage, run: RunRef) -> str:
    model_id = whole_model(storage, run)
    if model_id is None:
        raise WrongInput(
            f"MLflow run '{run.run_id}' has logged no model", way_out="give finished runs of the flow train"
        )
    return model_id


def _logged_digests(storage: Storage, run: RunRef) -> dict[str, str]:
    """Return the digests that the training run recorded, or those of its files if an older run recorded none."""
    recorded = client_of(storage).get_run(run.run_id).data.tags
    wanted = [f"{DIGEST_TAG}{name}" for name in FILE_LIMITS]
    if all(tag in recorded for tag in wanted):
        return {tag: recorded[tag] for tag in wanted}
    with TemporaryDirectory() as scratch:
        return file_digests(fetch_logged(storage, run, Path(scratch)))


def model_with_alias(storage: Storage, name: str, alias: str) -> ModelRef | None:
    """Return the model version that the alias names, or None.

    Raises:
        WrongInput: The version does not name a valid MLflow run.
    """
    return _reference(name, found_or_none(client_of(storage).get_model_version_by_alias, name, alias))


def _reference(name: str, found: ModelVersion | None) -> ModelRef | None:
    if found is None:
        return None
    run_id = checked_run_id(found.run_id, f"{name} version {found.version}")
    return ModelRef(name=name, version=int(found.version), run_id=run_id)


def has_model(storage: Storage, name: str) -> bool:
    """Return whether the registry has a registered model of this name."""
    return found_or_none(client_of(storage).get_registered_model, name) is not None


def names_with_alias(storage: Storage, alias: str) -> list[str]:
    """Return the names of the registered models that have a version with this alias, sorted."""
    return sorted(found.name for found in client_of(storage).search_registered_models() if alias in found.aliases)


def version_tags(storage: Storage, model: ModelRef) -> dict[str, str]:
    """Return the tags of a registered version."""
    return dict(client_of(storage).get_model_version(model.name, str(model.version)).tags)


def model_tags(storage: Storage, name: str) -> dict[str, str]:
    """Return the tags of the registered model `name`, which outlive its versions; none if it does not exist."""
    found = found_or_none(client_of(storage).get_registered_model, name)
    return {} if found is None else dict(found.tags)


def tag_model(storage: Storage, name: str, tag: str, value: str) -> None:
    """Set a tag of the registered model `name`."""
    client_of(storage).set_registered_model_tag(name, tag, value)


def describe_version(storage: Storage, model: ModelRef, section: str) -> None:
    """Set the description of a registered version to this Markdown, followed by the model card of its run."""
    client = client_of(storage)
    card = client.get_run(model.run_id).data.tags.get(DESCRIPTION_TAG, "")
    text = fit_description(f"{section}\n\n{card}", MAX_VERSION_DESCRIPTION)
    client.update_model_version(model.name, str(model.version), text)


def tag_version(storage: Storage, model: ModelRef, tags: Mapping[str, str]) -> None:
    """Set tags of a registered version."""
    client = client_of(storage)
    for name, value in tags.items():
        client.set_model_version_tag(model.name, str(model.version), name, value)


def untag_version(storage: Storage, model: ModelRef, tag: str) -> None:
    """Remove a tag of a registered version, if it has it."""
    client_of(storage).delete_model_version_tag(model.name, str(model.version), tag)


def set_alias(storage: Storage, model: ModelRef, alias: str) -> None:
    """Set the alias to this version."""
    client_of(storage).set_registered_model_alias(model.name, alias, str(model.version))


def remove_alias(storage: Storage, name: str, alias: str) -> None:
    """Remove the alias from the registered model `name`, if it has it."""
    client_of(storage).delete_registered_model_alias(name, alias)


def model_location(model: ModelRef) -> str:
    """Return the path of a registered version's page in MLflow's UI."""
    return f"/#/models/{quote(model.name, safe='')}/versions/{model.version}"


def source_name(table: TableRef, storage: Storage) -> str:
    """Return the source of a table as in its models' tags: the built-in digits are the same source in every home.

    An older table of the digits has the path of their folder as its source.
    """
    return BUILTIN_DIGITS if table.source == str(storage.digits) else table.source


def derived_model_name(table: TableRef, storage: Storage) -> str | None:
    """Return the name of the models that are trained on a table, or None if its source is unknown.

    It follows from the folder's name alone, so that it is the same in every home. The name of earlier releases, with a
    suffix for each table, is kept where the registry has it, and where the short name is that of another folder.

    Raises:
        TrackingUnavailable: The tracking server does not answer.
    """
    names = model_names(table, storage)
    if len(names) == 2:
        with reachable(storage):
            kept = has_model(storage, names[1]) or _is_of_another_source(storage, names[0], table.source)
            return names[1] if kept else names[0]
    return names[0] if names else None


def _is_of_another_source(storage: Storage, name: str, source: str) -> bool:
    """Return whether all versions of the registered model `name` are of the images of other folders."""
    versions = client_of(storage).search_model_versions(f"name = '{name}'")
    sources = {found.tags[SOURCE_TAG] for found in versions if found.tags.get(SOURCE_TAG)}
    return bool(sources) and source not in sources


def model_names(table: TableRef, storage: Storage) -> list[str]:
    """Return the name of the models of a table, and after it that of earlier releases if it was another one."""
    if not table.source:
        return []
    source = source_name(table, storage)
    if source == BUILTIN_DIGITS:
        return [f"{NAME_PREFIX}-digits"]
    if source.startswith(BUILTIN_DIGITS):  # other splits or labels of the digits, the same in every home as well
        return [f"{NAME_PREFIX}-digits-{_digest(source)}"]
    name = f"{NAME_PREFIX}-{readable_name(table.source, MAX_FOLDER_CHARACTERS)}"
    folder = table.source.rstrip("/").rpartition("/")[2]
    # A folder without Latin letters and digits has no other readable name than `images`.
    plain = name if re.search("[A-Za-z0-9]", folder) else f"{name}-{_digest(folder)}"
    # Another folder called `digits` has not the images of the built-in ones.
    if plain == f"{NAME_PREFIX}-digits":
        plain = f"{plain}-{_digest(table.source)}"
    return [plain, f"{name}-{_digest(f'{table.table_id}|{table.source}')}"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def fit_description(text: str, max_characters: int) -> str:
    """Return the text, or as many of its first sections as fit, followed by a note.

    If the first section does not fit, it is cut at a line break; if its first line does not fit, within that line.
    """
    if len(text) <= max_characters:
        return text
    room = max_characters - len(CUT_NOTE)
    # Not within a table or a code fence, whose remainder would be rendered as something else.
    end = max(text.rfind("\n## ", 0, room + 1), 0) or max(text.rfind("\n", 0, room + 1), 0) or room
    return text[:end].rstrip() + CUT_NOTE
