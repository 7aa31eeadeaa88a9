"""The table versions that registered models were trained from: maintenance keeps them readable."""

import logging
from collections.abc import Iterator, Mapping

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.server import client_of

logger = logging.getLogger("lakevision.tracking")

TABLE_TAG = "lakevision.table"
TABLE_VERSION_TAG = "lakevision.table_version"
TABLE_ID_TAG = "lakevision.table_id"
"""Delta's own id of the table that a model was trained from, the same wherever the table lies: a tag of its training
run and of its registered version."""

# Parameters of a training run, as `flat_params` names them.
TABLE_PARAM, TABLE_VERSION_PARAM, TABLE_ID_PARAM = "data.table", "data.version", "data.table_id"


def table_tags(params: Mapping[str, str]) -> dict[str, str]:
    """Return the tags by which a model version names its table, from the parameters of its run.

    They outlive the run, which a user may purge.
    """
    named = {TABLE_TAG: TABLE_PARAM, TABLE_VERSION_TAG: TABLE_VERSION_PARAM, TABLE_ID_TAG: TABLE_ID_PARAM}
    return {tag: params[param] for tag, param in named.items() if params.get(param)}


def trained_versions(storage: Storage) -> list[TableRef]:
    """Return the table versions that registered models were trained from.

    Of a model version without tags whose run was purged from MLflow nothing is known: a warning names it. Models that
    are not from a training run of this project are left out.
    """
    found: dict[TableRef, None] = {}
    for model in _model_versions(storage):
        tags = model.tags if TABLE_VERSION_TAG in model.tags else table_tags(_run_params(storage, model))
        if TABLE_TAG in tags and TABLE_VERSION_TAG in tags:
            table = TableRef(
                path=tags[TABLE_TAG], version=int(tags[TABLE_VERSION_TAG]), table_id=tags.get(TABLE_ID_TAG, "")
            )
            found[table] = None
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
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
    logger.warning(
        "%s version %s does not say which table version it was trained from, and its run %s was purged from MLflow: "
        "files of that table version are not kept for it",
        model.name, model.version, model.run_id,
    )  # fmt: skip
    return {}
