"""The table versions that registered models were trained from: maintenance keeps them readable."""

import json
import logging
import re
from collections.abc import Iterator, Mapping

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.registry_values import whole_number
from tasks.tracking.server import client_of

logger = logging.getLogger("lakevision.tracking")

TABLE_TAG = "lakevision.table"
TABLE_VERSION_TAG = "lakevision.table_version"
TABLE_ID_TAG = "lakevision.table_id"
"""Delta's own id of the table that a model was trained from, the same wherever the table lies: a tag of its training
run and of its registered version."""

SERVES_TAG = "lakevision.serves."
"""What the tags begin with that name the tables whose champion a version is; the table's id follows."""

# Parameters of a training run, as `flat_params` names them.
TABLE_PARAM, TABLE_VERSION_PARAM, TABLE_ID_PARAM = "data.table", "data.version", "data.table_id"


def table_tags(params: Mapping[str, str]) -> dict[str, str]:
    """Return the tags by which a model version names its table, from the parameters of its run.

    They outlive the run, which a user may purge.
    """
    named = {TABLE_TAG: TABLE_PARAM, TABLE_VERSION_TAG: TABLE_VERSION_PARAM, TABLE_ID_TAG: TABLE_ID_PARAM}
    return {tag: params[param] for tag, param in named.items() if params.get(param)}


def serving_tags(table: TableRef, source: str) -> dict[str, str]:
    """Return the tag by which a registered version is known as the champion of a table, or none without an id.

    A table with the same images has the champion of another, which keeps the tags of its own.

    Args:
        table: The version of the table that a promotion found it to be the champion of.
        source: Name of the table's source.
    """
    if re.fullmatch("[A-Za-z0-9-]{1,64}", table.table_id) is None:
        return {}
    served = {"path": table.path, "version": table.version, "source": source}
    return {f"{SERVES_TAG}{table.table_id}": json.dumps(served, sort_keys=True)}


def served_tables(tags: Mapping[str, str], of: str) -> Iterator[TableRef]:
    """Yield the tables of `serving_tags` in the tags of a registered version, each with the name of its source.

    Args:
        tags: The tags.
        of: The version's name, for the warning where one cannot be read.
    """
    for name, value in tags.items():
        if not name.startswith(SERVES_TAG):
            continue
        try:
            table = TableRef.model_validate_json(value, strict=True)
        except ValidationError:
            logger.warning("%s of %s is not a table in MLflow: it is not used", name, of)
            continue
        yield table.model_copy(update={"table_id": name.removeprefix(SERVES_TAG)})


def trained_versions(storage: Storage) -> list[TableRef]:
    """Return the table versions that registered models were trained from, or are the champions of.

    Of a model version without tags whose run was purged from MLflow nothing is known: a warning names it. Models that
    are not from a training run of this project are left out.
    """
    found: dict[TableRef, None] = {}
    for model in _model_versions(storage):
        of = f"{model.name} version {model.version}"
        tags = model.tags if TABLE_VERSION_TAG in model.tags else table_tags(_run_params(storage, model))
        version = whole_number(tags, TABLE_VERSION_TAG, of)
        if TABLE_TAG in tags and version is not None:
            found[TableRef(path=tags[TABLE_TAG], version=version, table_id=tags.get(TABLE_ID_TAG, ""))] = None
        for table in served_tables(model.tags, of):
            found[table.model_copy(update={"source": ""})] = None
    return list(found)


def _model_versions(storage: Storage) -> Iterator[ModelVersion]:
    client, token = client_of(storage), None
    while True:
        page = client.search_model_versions(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _run_params(storage: Storage, model: ModelVersion) -> dict[str, str]:
    if not model.run_id:
        return {}
    try:
        return dict(client_of(storage).get_run(model.run_id).data.params)
    except MlflowException as error:
        # The second is the answer to what is not the id of a run at all.
        if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            raise
    logger.warning(
        "%s version %s does not say which table version it was trained from, and its run %s was purged from MLflow: "
        "files of that table version are not kept for it",
        model.name, model.version, model.run_id,
    )  # fmt: skip
    return {}
