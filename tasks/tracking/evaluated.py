"""What runs and registered versions were tested on, read off MLflow."""

from dataclasses import dataclass, replace

from mlflow.exceptions import MlflowException

from tasks.errors import WrongInput
from tasks.refs import CacheRef, ModelRef, RunRef, TableRef
from tasks.storage import Storage
from tasks.tracking.kept import TABLE_ID_TAG, TABLE_TAG, TABLE_VERSION_TAG
from tasks.tracking.models import SOURCE_TAG, version_tags
from tasks.tracking.server import client_of

CONTENT_TAG = "lakevision.content_digest"
IMAGES_TAG = "lakevision.test_images"
ACCURACY_TAG = "test_accuracy"


@dataclass(frozen=True)
class EvaluatedRun:
    """The test accuracy of a run and the data it was measured on; what an older run does not say is empty."""

    run: RunRef
    accuracy: float
    """Share of right test images, 0-1."""
    images: int | None
    """Images of the split `test`."""
    table: TableRef | None
    content_digest: str
    """Of labels and splits of all images of the table's version."""
    cache: CacheRef | None

    def same_table(self, other: "EvaluatedRun") -> bool:
        """Return whether both were trained from the same Delta table, by its id, or by its path where one has none."""
        if self.table is None or other.table is None:
            return False
        if self.table.table_id and other.table.table_id:
            return self.table.table_id == other.table.table_id
        return self.table.path == other.table.path

    def same_content(self, other: "EvaluatedRun") -> bool:
        """Return whether both were tested on the same images with the same labels."""
        return bool(self.content_digest) and self.content_digest == other.content_digest


def evaluated_run(storage: Storage, run: RunRef) -> EvaluatedRun:
    """Return what a run was tested on.

    Raises:
        WrongInput: It has no test accuracy.
    """
    data = client_of(storage).get_run(run.run_id).data
    if "test_accuracy" not in data.metrics:
        raise WrongInput(f"MLflow run '{run.run_id}' has no metric test_accuracy: give finished runs of the flow train")
    given = data.params
    rows = given.get("data.rows.test", "")
    table = None
    if "data.table" in given:
        table = TableRef(
            path=given["data.table"],
            version=int(given["data.version"]),
            table_id=given.get("data.table_id", ""),
            source=given.get("data.source", ""),
        )
    return EvaluatedRun(
        run=run,
        accuracy=data.metrics["test_accuracy"],
        images=int(rows) if rows.isdecimal() else None,
        table=table,
        content_digest=given.get("data.content_digest", ""),
        cache=CacheRef(url=given["cache.url"], digest=given["cache.digest"]) if "cache.url" in given else None,
    )


def evaluation_tags(tested: EvaluatedRun, source: str) -> dict[str, str]:
    """Return the tags by which a registered version says what it was tested on.

    Args:
        tested: Its run.
        source: Name of the table's source.
    """
    tags = {ACCURACY_TAG: f"{tested.accuracy:.6f}", CONTENT_TAG: tested.content_digest}
    if tested.images is not None:
        tags[IMAGES_TAG] = str(tested.images)
    if tested.table is not None:
        # Together: maintenance keeps the files of this version of this table.
        tags |= {
            TABLE_TAG: tested.table.path,
            TABLE_VERSION_TAG: str(tested.table.version),
            TABLE_ID_TAG: tested.table.table_id,
            SOURCE_TAG: source,
        }
    return tags


def evaluated_version(storage: Storage, model: ModelRef) -> EvaluatedRun:
    """Return what a registered version was tested on: by its tags, and by its run where that is still there.

    Raises:
        WrongInput: Neither says its test accuracy.
    """
    tags = version_tags(storage, model)
    try:
        tested = evaluated_run(storage, RunRef(run_id=model.run_id))
    except (WrongInput, MlflowException) as error:
        if isinstance(error, MlflowException) and error.error_code not in (
            "RESOURCE_DOES_NOT_EXIST",
            "INVALID_PARAMETER_VALUE",
        ):
            raise
        if ACCURACY_TAG not in tags:
            raise WrongInput(
                f"the champion {model.name} version {model.version} has no test accuracy, so nothing can be compared "
                "with it: remove its alias in MLflow, or give another promote.model_name"
            ) from None
        images = tags.get(IMAGES_TAG, "")
        tested = EvaluatedRun(
            run=RunRef(run_id=model.run_id),
            accuracy=float(tags[ACCURACY_TAG]),
            images=int(images) if images.isdecimal() else None,
            table=None,
            content_digest=tags.get(CONTENT_TAG, ""),
            cache=None,
        )
    if TABLE_ID_TAG not in tags or TABLE_VERSION_TAG not in tags:
        return tested
    # A run is found again for another table of the same content: its version says which one it was promoted for.
    table = TableRef(
        path=tags.get(TABLE_TAG, "" if tested.table is None else tested.table.path),
        version=int(tags[TABLE_VERSION_TAG]),
        table_id=tags[TABLE_ID_TAG],
        source=tags.get(SOURCE_TAG, ""),
    )
    return replace(tested, table=table)
