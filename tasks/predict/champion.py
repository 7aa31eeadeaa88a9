"""Lookup of the registered version that predicts a table, by default the champion, and the check of its data."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import SparkSession

from tasks.config.etl import BUILTIN_DIGITS
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.errors import WrongInput, join_names
from tasks.model_package.description import DESCRIPTION_FILE, FILE_LIMITS, InvalidPackage, read_classes
from tasks.refs import ModelRef, RunRef, TableRef
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tracking.classifier_files import check_registered, fetch_registered
from tasks.tracking.models import (
    SOURCE_TAG,
    derived_model_name,
    fetch_logged,
    model_with_alias,
    names_with_alias,
    source_name,
    version_tags,
)
from tasks.tracking.server import reachable
from tasks.tracking.trained_tables import TABLE_ID_TAG, served_tables

logger = logging.getLogger("lakevision.predict")

NUM_NAMED = 5


def named_model(predict: PredictConfig, promote: PromoteConfig, storage: Storage) -> ModelRef | None:
    """Return the version of the model that the settings name, or None if they name no model.

    Raises:
        WrongInput: The model has no version with the alias.
    """
    return None if promote.model_name is None else _with_alias(promote.model_name, predict.alias, storage)


def model_of_table(table: TableRef, predict: PredictConfig, storage: Storage) -> ModelRef:
    """Return the version of the model that is trained from this table.

    Raises:
        WrongInput: The table has no source from which to derive a name, or the model has no version with the alias.
    """
    name = derived_model_name(table, storage)
    if name is None:
        raise WrongInput(
            f"promote.model_name is empty, and '{table.path}' was not made by the flow etl, so it has no model of its "
            "own",
            setting="promote.model_name",
            way_out=f"set promote.model_name{_candidates(predict.alias, storage)}",
        )
    return _with_alias(name, predict.alias, storage)


def champion_of(promote: PromoteConfig, alias: str, storage: Storage, spark: SparkSession | None = None) -> ModelRef:
    """Return the version that predicts images outside tables: of the model that is named, or of the table `images`.

    Args:
        promote: Settings with the model's name, if it is given.
        alias: Alias of the version.
        storage: Location of the registry, and of the table.
        spark: The session, or None.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
        WrongInput: There is none, or it was not registered by this project.
    """
    predict = PredictConfig(alias=alias)
    found = named_model(predict, promote, storage) or model_of_images(predict, storage, spark)
    check_promoted(found, storage)
    return found


def model_of_images(predict: PredictConfig, storage: Storage, spark: SparkSession | None) -> ModelRef:
    """Return the version of the model that is trained from the table `images`, for files that are in no table.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
        WrongInput: The table does not exist, or as `model_of_table`.
    """
    newest = snapshots.newest_snapshot(spark, storage.table("images"))
    if newest is None:
        given = f"predict.source is '{predict.source}', and " if predict.source else ""
        raise WrongInput(
            f"{given}promote.model_name is empty, but the table '{storage.table('images')}', whose model would "
            "predict, does not exist",
            setting="promote.model_name",
            way_out=f"set promote.model_name{_candidates(predict.alias, storage)}",
        )
    return model_of_table(newest.table, predict, storage)


def _with_alias(name: str, alias: str, storage: Storage) -> ModelRef:
    with reachable(storage):
        model = model_with_alias(storage, name, alias)
        if model is None:
            message, first = f"the registered model '{name}' has no version with the alias '{alias}'", ""
            if name in names_with_alias(storage, alias):
                message = f"the alias '{alias}' of the registered model '{name}' names a version that was deleted"
                first = "give the alias to another version in MLflow, "
            raise WrongInput(
                message,
                setting="promote.model_name",
                way_out=f"{first}run the flow promote first, or give another promote.model_name or predict.alias"
                f"{_candidates(alias, storage, name)}",
            )
    return model


def _candidates(alias: str, storage: Storage, name: str | None = None) -> str:
    """Return the models that have a version with the alias, for a message about another model than `name`."""
    names = [found for found in names_with_alias(storage, alias) if found != name]
    return f" (there is '{alias}' of {join_names(names[:NUM_NAMED], len(names))})" if names else ""


def check_model(
    model: ModelRef, table: TableRef, predict: PredictConfig, promote: PromoteConfig, storage: Storage
) -> None:
    """Check that a model was registered by this project and trained on the table.

    Args:
        model: The registered version.
        table: The table to predict.
        predict: Settings of inference; if they name the table, a model of another table is only logged.
        promote: Settings with the model's name; without one, it was derived from the table.
        storage: Location of the tracking server.

    Raises:
        WrongInput: The version has no digests, or was trained on another table or on images of another source.
    """
    tags = check_promoted(model, storage)
    source, table_source = tags.get(SOURCE_TAG, ""), source_name(table, storage)
    known = {(tags.get(TABLE_ID_TAG, ""), source)}
    known |= {(served.table_id, served.source) for served in served_tables(tags, _name(model))}
    same_table = bool(table.table_id) and not known.isdisjoint({(table.table_id, ""), (table.table_id, table_source)})
    if same_table or (source == table_source and table_source.startswith(BUILTIN_DIGITS)):
        return
    trained_on = f"another table{f', of images of {source!r},' if source else ''}"
    requested = f"'{table.path}'{f', whose images are of {table_source!r}' if table_source else ''}"
    if predict.table is not None:
        logger.warning("%s was trained on %s and now predicts %s", _name(model), trained_on.rstrip(","), requested)
        return
    name_is_given = promote.model_name is not None
    way_out = "leave promote.model_name empty for this table's own model, or " if name_is_given else ""
    raise WrongInput(
        f"{_name(model)} was trained on {trained_on} and not on {requested}",
        setting="promote.model_name" if name_is_given else "",
        way_out=f"{way_out}name the table in predict.table to predict it with this model anyway",
    )


def check_promoted(model: ModelRef, storage: Storage) -> dict[str, str]:
    """Return the tags of a version that was registered by this project.

    Raises:
        WrongInput: The version has no digests.
        TrackingUnavailable: The tracking server does not answer.
    """
    with reachable(storage):
        tags = version_tags(storage, model)
    check_registered(tags, model)
    return tags


def _name(model: ModelRef) -> str:
    return f"{model.name} version {model.version}"


def known_classes(model: ModelRef | RunRef, storage: Storage) -> tuple[str, ...]:
    """Return the classes of a registered version, or of the model that a run logged; torch is not imported.

    Raises:
        WrongInput: The description of the model is missing or invalid, or differs from the registered one.
    """
    limits = {DESCRIPTION_FILE: FILE_LIMITS[DESCRIPTION_FILE]}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        if isinstance(model, RunRef):
            fetch_logged(storage, model, folder, limits)
        else:
            fetch_registered(storage, model, folder, limits)
        with translate_invalid():
            return read_classes(folder).classes


@contextmanager
def translate_invalid() -> Iterator[None]:
    """Raise the error of an invalid model package as an error for users.

    Raises:
        WrongInput: The package is damaged, or was not written by this project.
    """
    try:
        yield
    except InvalidPackage as error:
        raise WrongInput.complete(error, way_out=error.way_out) from None
