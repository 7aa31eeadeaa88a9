"""The test accuracy and test data of runs and registered versions, read from MLflow."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlflow.exceptions import MlflowException

from tasks.errors import WrongInput
from tasks.refs import CacheRef, ModelRef, RunRef, TableRef
from tasks.storage import Storage
from tasks.tracking.models import SOURCE_TAG, version_tags
from tasks.tracking.registry_values import share, whole_number
from tasks.tracking.server import client_of, is_missing
from tasks.tracking.trained_tables import (
    TABLE_ID_PARAM,
    TABLE_ID_TAG,
    TABLE_PARAM,
    TABLE_TAG,
    TABLE_VERSION_PARAM,
    TABLE_VERSION_TAG,
    served_tables,
)

CONTENT_TAG = "lakevision.content_digest"
IMAGES_TAG = "lakevision.test_images"
ACCURACY_TAG = "test_accuracy"
TABLE_TAGS = (TABLE_TAG, TABLE_VERSION_TAG, TABLE_ID_TAG, SOURCE_TAG)
"""Tags of a registered version that name the table for which it was first promoted."""


FOLDS_METRICS = ("folds_accuracy", "folds_accuracy_low", "folds_accuracy_high")
"""Metrics of a cross-validation of the head: mean accuracy of the parts, and its 95 % interval."""


@dataclass(frozen=True)
class EvaluatedRun:
    """The test accuracy of a run and its data; values that an older run did not record are empty or None."""

    run: RunRef
    accuracy: float
    """Fraction of test images that were classified correctly, 0-1."""
    images: int | None
    """Number of images in the split `test`."""
    table: TableRef | None
    content_digest: str
    """Digest of the labels and splits of all images in the table's version."""
    cache: CacheRef | None
    val_accuracy: float | None = None
    """Fraction of the images of the split `val` that were classified correctly in the best epoch, 0-1."""
    macro_f1: float | None = None
    """Macro F1 on the split `test`, 0-1."""
    folds: tuple[float, ...] = ()
    """Mean accuracy of the head in a cross-validation, and its 95 % interval; empty without one."""
    serves: tuple[TableRef, ...] = ()
    """Other tables of which a registered version is the champion."""

    def same_table(self, other: "EvaluatedRun") -> bool:
        """Return whether both were trained on the same Delta table, by its id, or by its path if an id is missing."""
        if self.table is None or other.table is None:
            return False
        if self.table.table_id and other.table.table_id:
            return self.table.table_id == other.table.table_id
        return self.table.path == other.table.path

    def is_served_by(self, other: "EvaluatedRun") -> bool:
        """Return whether a registered version is the champion of this run's table, though trained on another one."""
        return self.table is not None and self.table.table_id in {table.table_id for table in other.serves} - {""}

    def same_content(self, other: "EvaluatedRun") -> bool:
        """Return whether both were tested on the same images with the same labels."""
        return bool(self.content_digest) and self.content_digest == other.content_digest


def evaluated_run(storage: Storage, run: RunRef) -> EvaluatedRun:
    """Return the test accuracy and test data of a run.

    Raises:
        WrongInput: The run has no test accuracy.
    """
    data, of = client_of(storage).get_run(run.run_id).data, f"MLflow run {run.run_id}"
    accuracy = share(data.metrics, "test_accuracy", of)
    if accuracy is None:
        raise WrongInput(
            f"MLflow run '{run.run_id}' has no metric test_accuracy", way_out="give finished runs of the flow train"
        )
    params = data.params
    cache = None
    if "cache.url" in params and "cache.digest" in params:
        cache = CacheRef(url=params["cache.url"], digest=params["cache.digest"])
    return EvaluatedRun(
        run=run,
        accuracy=accuracy,
        images=whole_number(params, "data.rows.test", of),
        table=_table_in(params, of),
        content_digest=params.get("data.content_digest", ""),
        cache=cache,
        val_accuracy=share(data.metrics, "best_val_accuracy", of),
        macro_f1=share(data.metrics, "test_macro_f1", of),
        folds=tuple(found for name in FOLDS_METRICS if (found := share(data.metrics, name, of)) is not None),
    )


def _table_in(params: Mapping[str, str], of: str) -> TableRef | None:
    """Return the table in a run's parameters, or None if they have none."""
    version = whole_number(params, TABLE_VERSION_PARAM, of)
    if TABLE_PARAM not in params or version is None:
        return None
    return TableRef(
        path=params[TABLE_PARAM],
        version=version,
        table_id=params.get(TABLE_ID_PARAM, ""),
        source=params.get("data.source", ""),
    )


def recorded_table(storage: Storage, run_id: str) -> TableRef | None:
    """Return the table version that a run has recorded as its data, or None if it was killed before."""
    return _table_in(client_of(storage).get_run(run_id).data.params, f"MLflow run {run_id}")


def evaluation_tags(tested: EvaluatedRun, source: str) -> dict[str, str]:
    """Return the tags with the test accuracy and test data of a registered version.

    Args:
        tested: The run of the version.
        source: Name of the table's source.
    """
    tags = {ACCURACY_TAG: f"{tested.accuracy:.6f}", CONTENT_TAG: tested.content_digest}
    if tested.images is not None:
        tags[IMAGES_TAG] = str(tested.images)
    if tested.table is not None:
        # All of them together: maintenance keeps the files of this version of the table.
        tags |= {
            TABLE_TAG: tested.table.path,
            TABLE_VERSION_TAG: str(tested.table.version),
            TABLE_ID_TAG: tested.table.table_id,
            SOURCE_TAG: source,
        }
    return tags


def evaluated_version(storage: Storage, model: ModelRef) -> EvaluatedRun:
    """Return the test accuracy and test data of a registered version, from its tags, and from its run if that exists.

    Raises:
        WrongInput: Neither of them has a test accuracy.
    """
    tags, of = version_tags(storage, model), f"{model.name} version {model.version}"
    try:
        tested = evaluated_run(storage, RunRef(run_id=model.run_id))
    except (WrongInput, MlflowException) as error:
        if isinstance(error, MlflowException) and not is_missing(error):
            raise
        accuracy = share(tags, ACCURACY_TAG, of)
        if accuracy is None:
            raise WrongInput(
                f"the champion {model.name} version {model.version} has no test accuracy, so nothing can be compared "
                "with it",
                setting="promote.model_name",
                way_out="give its alias to another version in MLflow, or give another promote.model_name",
            ) from None
        tested = EvaluatedRun(
            run=RunRef(run_id=model.run_id),
            accuracy=accuracy,
            images=whole_number(tags, IMAGES_TAG, of),
            table=None,
            content_digest=tags.get(CONTENT_TAG, ""),
            cache=None,
        )
    version = whole_number(tags, TABLE_VERSION_TAG, of)
    tested = replace(tested, serves=tuple(served_tables(tags, of)))
    if TABLE_ID_TAG not in tags or version is None:
        return tested
    # A run is reused for other tables with the same content: its version's tags name the table it was promoted for.
    table = TableRef(
        path=tags.get(TABLE_TAG, "" if tested.table is None else tested.table.path),
        version=version,
        table_id=tags[TABLE_ID_TAG],
        source=tags.get(SOURCE_TAG, ""),
    )
    return replace(tested, table=table)
