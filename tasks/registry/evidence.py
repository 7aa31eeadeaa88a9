"""The comparison of challenger and champion: image by image, or by recorded accuracies if only Spark can read them."""

import logging
from dataclasses import dataclass

import pyarrow as pa

from tasks.cache.manifest import CacheDamaged
from tasks.config.promotion import PromoteConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef, TableRef
from tasks.registry.comparison import compare
from tasks.registry.decision import Comparison
from tasks.registry.pairs import paired_predictions
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tracking import EvaluatedRun

logger = logging.getLogger("lakevision.registry")


class ChampionUnusable(Exception):
    """The champion cannot be evaluated on the challenger's images; the message says why."""


@dataclass(frozen=True)
class RecordedAccuracy:
    """The champion's accuracy for a comparison with a challenger where the table cannot be read without Spark.

    Attributes:
        accuracy: Fraction of test images that were classified correctly, 0-1.
        images: Number of test images; None if it is unknown.
        measured_on: Description of the images, for the reason of the decision.
        is_comparable: Whether a challenger with a higher accuracy may replace the champion.
    """

    accuracy: float
    images: int | None
    measured_on: str
    is_comparable: bool = True


def check_readable(best: EvaluatedRun, storage: Storage) -> None:
    """Check that the images of a run's table and the table `predictions` can be read without Spark.

    Raises:
        NeedsSpark: They cannot, the run records no table, or another table is at its path now.
        WrongInput: The table has no test images.
    """
    from tasks.predict.held_out import first_image  # torch: seconds

    if best.table is None:
        raise NeedsSpark
    snapshots.newest_snapshot(None, storage.table("predictions"))
    if first_image(best.table) is None:
        raise WrongInput(
            f"version {best.table.version} of '{best.table.path}' has no test images, on which run "
            f"{best.run.run_id} could be compared with the champion: promote a run on a version that has some"
        )


def compare_on_images(
    challenger: ModelRef,
    best: EvaluatedRun,
    version: ModelRef,
    champion: EvaluatedRun,
    promote: PromoteConfig,
    storage: Storage,
) -> Comparison:
    """Compare two versions on the test images of the challenger's table, by their rows in `predictions`.

    Missing rows are predicted and appended first.

    Args:
        challenger: The challenger.
        best: Its run.
        version: The champion.
        champion: Its run.
        promote: Settings of the gate.
        storage: Location of the table `predictions`.

    Raises:
        NeedsSpark: Only Spark can read one of the tables, or the challenger's run records none.
        ChampionUnusable: The champion cannot be loaded, or was trained on all test images.
        WrongInput: The challenger cannot be loaded, or the table `predictions` has other columns.
    """
    from tasks.predict.held_out import predict_held_out  # torch: seconds

    assert best.table is not None, "it can be read"
    predict_held_out(challenger, best.table, storage)
    try:
        predict_held_out(version, best.table, storage)
    except WrongInput as error:
        raise ChampionUnusable(str(error)) from None
    seen = None if best.same_content(champion) else champion.table
    try:
        pairs, left_out = paired_predictions(challenger, version, best.table, seen, storage)
    except NeedsSpark:
        if seen is None:
            raise
        logger.warning(
            "version %d of '%s', on which the champion was trained, cannot be read: its images are not left out",
            seen.version,
            seen.path,
        )
        pairs, left_out = paired_predictions(challenger, version, best.table, None, storage)
    if not pairs:
        raise ChampionUnusable(f"it was trained on all {left_out} test images")
    found = compare(pairs, left_out)
    if promote.max_latency_ratio is None:
        return found
    ours, theirs = _latencies(challenger, version, best.table, storage)
    return found.model_copy(update={"challenger_milliseconds": ours, "champion_milliseconds": theirs})


def _latencies(challenger: ModelRef, champion: ModelRef, table: TableRef, storage: Storage) -> list[float]:
    from tasks.predict.accuracy import load_registered
    from tasks.predict.held_out import first_image
    from tasks.predict.latency import median_milliseconds

    image = first_image(table)
    assert image is not None, "there are pairs of predictions"
    return median_milliseconds([load_registered(model, storage) for model in (challenger, champion)], image)


def recorded_accuracy(
    best: EvaluatedRun, champion: EvaluatedRun, version: ModelRef, storage: Storage
) -> RecordedAccuracy:
    """Return the champion's accuracy where the challenger's table cannot be read without Spark.

    If it was tested on other images, it is tested again on the challenger's cache.

    Raises:
        ChampionUnusable: The champion cannot be loaded.
    """
    if best.same_content(champion):
        return RecordedAccuracy(champion.accuracy, champion.images, "on the same images")
    from tasks.predict.accuracy import accuracy_on_cache, load_registered  # torch: seconds

    try:
        classifier = load_registered(version, storage)
    except WrongInput as error:
        raise ChampionUnusable(str(error)) from None
    problem = "the challenger's run records no cache, and its table cannot be read without Spark"
    if best.cache is not None:
        try:
            again = "on the same images, on which it was tested again"
            return RecordedAccuracy(accuracy_on_cache(classifier, best.cache), best.images, again)
        except (WrongInput, CacheDamaged, OSError, pa.ArrowInvalid) as error:
            problem = str(error)
    logger.warning("the champion is kept, since it could not be tested on the challenger's images: %s", problem)
    measured_on = (
        f"on {num_test_images(champion)} of an earlier version of the table, so the two cannot be compared; it could "
        f"not be tested again: {problem} (to promote the run all the same, remove the alias from the model in MLflow "
        "and promote the run again)"
    )
    return RecordedAccuracy(champion.accuracy, champion.images, measured_on, is_comparable=False)


def num_test_images(tested: EvaluatedRun) -> str:
    """Return the number of images that a run was tested on, as text."""
    return "an unknown number of test images" if tested.images is None else f"{tested.images} test images"
