"""The comparison of challenger and champion: image by image, or by recorded accuracies if their table is gone."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.cache.manifest import CacheDamaged
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef, TableRef
from tasks.registry.aliases import CHALLENGER
from tasks.registry.comparison import compare
from tasks.registry.decision import Approval, Comparison
from tasks.registry.judged import note_judged
from tasks.registry.pairs import Competitor, paired_predictions
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.text.forms import composed
from tasks.tracking import models
from tasks.tracking.evaluated import EvaluatedRun

logger = logging.getLogger("lakevision.registry")


@dataclass(frozen=True)
class Challenge:
    """A run that may become the champion.

    Attributes:
        best: The run, with the data it was tested on.
        accuracies: Accuracy (0-1) of all candidate runs on the split `val`, by MLflow run id.
        name: Name of the registered model.
        promote: Settings of the gate.
        storage: Storage with the tracking URI.
        spark: Settings of the session for tables that only Spark can read.
        predict: Settings of inference for the rows that a comparison adds to `predictions`.
        approval: Answer of the user who was asked, or None.
        reason: Why the run replaces a champion that cannot be evaluated, as its user says; empty without one.
        earlier: Version as which an earlier promotion registered the run, or None.
        rolled_back: Sentence on the rollback of the run's version, or None.
    """

    best: EvaluatedRun
    accuracies: Mapping[str, float | None]
    name: str
    promote: PromoteConfig
    storage: Storage
    spark: SparkConfig
    predict: PredictConfig
    approval: Approval | None
    reason: str = ""
    earlier: ModelRef | None = None
    rolled_back: str | None = None


class ChampionUnusable(Exception):
    """The champion cannot be evaluated on the challenger's images; the message says why."""


class TableGone(Exception):
    """The challenger's run records no table, or it is not at its path any more."""


def current_table(spark: SparkSession | None, best: EvaluatedRun, storage: Storage) -> TableRef:
    """Return the newest version of a run's table, on whose test images models are compared.

    Args:
        spark: The session, or None.
        best: The run.
        storage: Location of the table `predictions`, which must be readable as well.

    Raises:
        NeedsSpark: Only Spark can read one of the tables.
        TableGone: The run records no table, or its path has none or another one.
        WrongInput: The table has no test images.
    """
    from tasks.predict.held_out import first_image  # torch: seconds

    if best.table is None:
        raise TableGone
    table = _newest_version(spark, best.table, storage)
    snapshots.newest_snapshot(spark, storage.table("predictions"))
    if first_image(spark, table) is None:
        raise WrongInput(
            f"version {table.version} of '{table.path}' has no test images, on which run {best.run.run_id} could be "
            "compared with the champion",
            way_out="promote a run on a version that has some",
        )
    return table


def _newest_version(spark: SparkSession | None, table: TableRef, storage: Storage) -> TableRef:
    """Return the newest version of a table, at its path or, if a home was moved, at that of the table `images`."""
    for path in (table.path, *((storage.table("images"),) if table.table_id else ())):
        newest = snapshots.newest_snapshot(spark, path)
        if newest is not None and newest.table.table_id == (table.table_id or newest.table.table_id):
            return newest.table
    raise TableGone


def compare_on_images(
    challenge: Challenge, version: ModelRef, champion: EvaluatedRun, classes: Sequence[str], spark: SparkSession | None
) -> Comparison:
    """Register the run with the alias `challenger`, and compare both on its table's test images, by their predictions.

    Missing rows are predicted and added first. Both models are judged on the bytes in the table: where a row is of
    other bytes, the image is predicted again. That the images judge the challenger is noted in the registry.

    Args:
        challenge: The challenger.
        version: The champion.
        champion: Its run.
        classes: The champion's classes.
        spark: The session, or None.

    Raises:
        NeedsSpark: Only Spark can read or write one of the tables.
        TableGone: As `current_table`.
        ChampionUnusable: The champion cannot be loaded, or was trained on all test images.
        WrongInput: As `current_table`. The challenger cannot be loaded or was trained on all test images, or the table
            `predictions` has other columns. One of the two cannot predict with the settings.
    """
    from tasks.predict.held_out import held_out_images, predict_held_out  # torch: seconds
    from tasks.predict.scoring import check_settings

    best, storage, predict = challenge.best, challenge.storage, challenge.predict
    table = current_table(spark, best, storage)
    challenger = models.register_run(storage, best.run, challenge.name)
    if models.model_with_alias(storage, challenge.name, CHALLENGER) != challenger:
        models.set_alias(storage, challenger, CHALLENGER)
    tested = held_out_images(spark, table, storage)
    ours_again = predict_held_out(spark, challenger, table, tested, storage, predict)
    check_settings(predict, classes)  # The settings are wrong then, and not the champion.
    try:
        theirs_again = predict_held_out(spark, version, table, tested, storage, predict)
    except WrongInput as error:
        raise ChampionUnusable(str(error)) from None
    ours = Competitor(challenger, _trained_on(spark, best.table, table, "the challenger"), ours_again)
    # Trained on the same images with the same splits, maybe of another table.
    theirs = (
        ours.trained_on if best.same_content(champion) else _trained_on(spark, champion.table, table, "the champion")
    )
    paired = paired_predictions(spark, ours, Competitor(version, theirs, theirs_again), tested, storage)
    if not paired.num_new:
        raise WrongInput(
            f"run {best.run.run_id} was trained on all {paired.num_tested} test images of version {table.version} of "
            f"'{table.path}', so it cannot be compared with the champion",
            way_out="train on that version",
        )
    if not paired.pairs:
        raise ChampionUnusable(f"it was trained on all {paired.left_out} test images")
    found = compare(paired.pairs, paired.left_out)
    seen = {one.label for one in found.classes}
    known = {
        "table_version": table.version,
        "num_judged": note_judged(storage, challenger.name, best.run, best.content_digest, paired.sample),
        "unseen": tuple(sorted(label for label in classes if composed(label) not in seen)),
    }
    if challenge.promote.max_latency_ratio is not None:
        known |= _latencies(spark, challenger, version, table, storage)
    return found.model_copy(update=known)


def _trained_on(
    spark: SparkSession | None, trained_on: TableRef | None, current: TableRef, which: str
) -> TableRef | None:
    """Return the version whose images of other splits are left out; None for the current one, or if it is gone."""
    if trained_on is not None and trained_on.table_id and trained_on.table_id == current.table_id:
        trained_on = trained_on.model_copy(update={"path": current.path})  # The table may have been moved.
    if trained_on is None or (trained_on.path, trained_on.version) == (current.path, current.version):
        return None
    if snapshots.has_version(spark, trained_on):
        return trained_on
    logger.warning(
        "version %d of '%s', on which %s was trained, cannot be read: its images are not left out",
        trained_on.version,
        trained_on.path,
        which,
    )
    return None


def _latencies(
    spark: SparkSession | None, challenger: ModelRef, champion: ModelRef, table: TableRef, storage: Storage
) -> dict[str, float]:
    from tasks.predict.evaluation import load_registered, median_milliseconds
    from tasks.predict.held_out import first_image

    image = first_image(spark, table)
    assert image is not None, "there are pairs of predictions"
    ours, theirs = median_milliseconds([load_registered(model, storage) for model in (challenger, champion)], image)
    return {"challenger_milliseconds": ours, "champion_milliseconds": theirs}


def recorded_accuracy(
    best: EvaluatedRun, champion: EvaluatedRun, version: ModelRef, storage: Storage
) -> tuple[float, int | None, str]:
    """Return the champion's accuracy where the challenger's table is gone.

    If it was tested on other images, it is tested again on the challenger's cache.

    Returns:
        The fraction of test images that were classified correctly (0-1), the number of these images (None if it is
        unknown), and their description for the reason of the decision.

    Raises:
        ChampionUnusable: The champion cannot be loaded, or cannot be tested on the challenger's images.
    """
    if best.same_content(champion):
        return champion.accuracy, champion.images, "on the same images"
    from tasks.predict.evaluation import accuracy_on_cache, load_registered  # torch: seconds

    try:
        classifier = load_registered(version, storage)
    except WrongInput as error:
        raise ChampionUnusable(str(error)) from None
    problem = "the challenger's run records no cache, and its table is gone"
    if best.cache is not None:
        try:
            again = "on the same images, on which it was tested again"
            return accuracy_on_cache(classifier, best.cache), best.images, again
        except (WrongInput, CacheDamaged, FileNotFoundError, pa.ArrowInvalid) as error:
            problem = str(error)
    raise ChampionUnusable(
        f"its accuracy of {champion.accuracy:.4f} was measured on {num_test_images(champion)} of an earlier version of "
        f"the table, and it could not be tested again: {problem}"
    )


def num_test_images(tested: EvaluatedRun) -> str:
    """Return the number of images that a run was tested on, as text."""
    return "an unknown number of test images" if tested.images is None else f"{tested.images} test images"
