"""The table versions that registered models were trained on, which maintenance keeps readable."""

import json
import logging
import re
from collections.abc import Iterator, Mapping

from mlflow.entities.model_registry import ModelVersion
from pydantic import ValidationError

from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.registry_values import whole_number
from tasks.tracking.server import all_results, client_of, found_or_none

logger = logging.getLogger("lakevision.tracking")

TABLE_TAG = "lakevision.table"
TABLE_VERSION_TAG = "lakevision.table_version"
TABLE_ID_TAG = "lakevision.table_id"
"""Tag of a training run and of its registered version: Delta's id of the table, which moving it does not change."""

SERVES_TAG = "lakevision.serves."
"""Prefix of the tags that name the tables whose champion a version is; the table's id follows."""

NOT_PROMOTED_TAG = "lakevision.not_promoted"
"""Tag of a version that was registered for a comparison with the champion and lost, with the sentence that says so."""

# Parameters of a training run, as named by `flat_params`.
TABLE_PARAM, TABLE_VERSION_PARAM, TABLE_ID_PARAM = "data.table", "data.version", "data.table_id"


def table_tags(params: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a model version that name its table, from the parameters of its run.

    The tags remain if a user purges the run.
    """
    named = {TABLE_TAG: TABLE_PARAM, TABLE_VERSION_TAG: TABLE_VERSION_PARAM, TABLE_ID_TAG: TABLE_ID_PARAM}
    return {tag: params[param] for tag, param in named.items() if params.get(param)}


def serving_tags(table: TableRef, source: str) -> dict[str, str]:
    """Return the tag that marks a registered version as the champion of a table; empty if the table has no id.

    Tables with the same images share a champion, whose other tags name only the table that it was trained on.

    Args:
        table: The version of the table for which it was promoted.
        source: Name of the table's source.
    """
    if re.fullmatch("[A-Za-z0-9-]{1,64}", table.table_id) is None:
        return {}
    served = {"path": table.path, "version": table.version, "source": source}
    return {f"{SERVES_TAG}{table.table_id}": json.dumps(served, sort_keys=True)}


def served_tables(tags: Mapping[str, str], of: str) -> Iterator[TableRef]:
    """Yield the tables that `serving_tags` wrote into the tags of a registered version, with their sources.

    Args:
        tags: Tags of the version.
        of: Name of the version, for the warning about an invalid tag.
    """
    for name, value in tags.items():
        if not name.startswith(SERVES_TAG):
            continue
        try:
            table = TableRef.model_validate_json(value, strict=True)
        except ValidationError:
            logger.warning("the tag %s of %s in MLflow is not a valid table: it is ignored", name, of)
            continue
        yield table.model_copy(update={"table_id": name.removeprefix(SERVES_TAG)})


def trained_versions(storage: Storage) -> list[TableRef]:
    """Return the table versions that registered models were trained on, or are the champions of.

    For a model version without tags whose run was purged from MLflow, the table is unknown: a warning is logged.
    Models that are not from a training run of this project are skipped, and versions that lost against the champion.
    """
    found: dict[TableRef, None] = {}
    client = client_of(storage)
    models: Iterator[ModelVersion] = all_results(lambda token: client.search_model_versions(page_token=token))
    for model in models:
        of = f"{model.name} version {model.version}"
        tags = model.tags if TABLE_VERSION_TAG in model.tags else table_tags(_run_params(storage, model))
        version = whole_number(tags, TABLE_VERSION_TAG, of)
        if TABLE_TAG in tags and version is not None and NOT_PROMOTED_TAG not in model.tags:
            found[TableRef(path=tags[TABLE_TAG], version=version, table_id=tags.get(TABLE_ID_TAG, ""))] = None
        for table in served_tables(model.tags, of):
            found[table.model_copy(update={"source": ""})] = None
    return list(found)


def _run_params(storage: Storage, model: ModelVersion) -> dict[str, str]:
    if not model.run_id:
        return {}
    if (run := found_or_none(client_of(storage).get_run, model.run_id)) is not None:
        return dict(run.data.params)
    logger.warning(
        "%s version %s does not record which table version it was trained on, and its run %s was purged from MLflow: "
        "that version's files are not retained",
        model.name, model.version, model.run_id,
    )  # fmt: skip
    return {}
